// Threads that help while they are awake: nobody waits for one that the machine has put aside, as barriers do, which on a machine with other work
// makes two threads slower than one.
#pragma once

using Work = void (*)(void* context, long item);

// work(context, item) for every item below `count`, each once, on this thread and up to threads - 1 others.
void share_out(long count, int threads, Work work, void* context);

template <class Body>
void share(long count, int threads, Body body) {
  if (threads <= 1 || count <= 1) {
    for (long item = 0; item < count; item++) body(item);
    return;
  }
  share_out(count, threads, [](void* context, long item) { (*static_cast<Body*>(context))(item); }, &body);
}
