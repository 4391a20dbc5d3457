// What a block of wide_quantized.cu has where: the stages in shared memory, and who of its threads has which sums.
#pragma once

// Sums of a group's columns lie beside those of all: where that would take too many registers, half of the tokens have their turn after the others.
#define TURNS (GROUPED && TOKENS > 128 ? 2 : 1)
#if GROUPED && TOKENS > 128
#define WGMMA_N 96
#else
#define WGMMA_N TOKENS
#endif

constexpr int TILE = 64, UNIT = 64, STEP = UNITS * UNIT;  // rows of a tile; bytes of each of a unit, and columns of each part; of a step
constexpr int LINE = UNITS > 1 ? 128 : 64, LINES = STEP / LINE;  // bytes that lie together in shared memory, swizzled
constexpr int TOKEN_BYTES = ROUNDED ? 64 : 128;  // of a token's columns of a unit
constexpr int ALL_TOKEN_BYTES = PARTS * UNITS * ROWS * TOKEN_BYTES, CODE_BYTES = TILE * STEP, ROW_BYTES = TILE * 4;  // ROW_BYTES: of the rows' scales
constexpr int SPANS = UNITS / SPAN * PARTS;  // of a step, that have scales of their own
constexpr int SUM_LINES = ROUNDED && KIND == 2 ? SPANS : 0, LINE_BYTES = TOKENS * 4;  // of sums of x's codes, which belong to a span
constexpr int SCALE_PLACE = ALL_TOKEN_BYTES + CODE_BYTES, ZERO_PLACE = SCALE_PLACE + (GROUPED ? SPANS * ROW_BYTES : 0);
constexpr int CODE_SUM_PLACE = ZERO_PLACE + (ZEROS ? SPANS * ROW_BYTES : 0);
constexpr int STAGE_BYTES = (CODE_SUM_PLACE + SUM_LINES * LINE_BYTES + 1023) / 1024 * 1024;
constexpr int GROUPS = 2, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;  // warpgroups that multiply, their threads
constexpr int BLOCKS = TOKENS / 8, HALF = BLOCKS / GROUPS, OWN = HALF / SPLIT;  // of eight tokens: all, a warpgroup's in the end, and with SPLIT
constexpr int OUTPUTS = GATED ? TILE / 2 : TILE, PITCH = OUTPUTS * 2 + 16;       // of a tile; bytes of a token's in shared memory
constexpr int SUM_BYTES = TOKENS * TILE * 4, REMOTE_BYTES = SPLIT > 1 ? SUM_BYTES / 2 : 0;
// As many registers as leave room for other kernels' blocks, but where a thread has many sums.
constexpr int MOST_THREADS = GROUPED && TOKENS > 64 ? 384 : 512, LAUNCH_REGISTERS = 65536 / MOST_THREADS / 8 * 8, PRODUCER_REGISTERS = GROUPED ? 56 : 32;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * 128) / CONSUMERS / 8 * 8;
static_assert(ROWS == TOKENS || (ROWS == 8 && TOKENS <= 32), "a product reads what lies behind the rows, which is the stage's own");
static_assert(TOKENS * PITCH <= SUM_BYTES, "outputs have no room where sums were");
// A barrier's wait cannot tell a phase from the one after the next, so a stage belongs to one warpgroup.
static_assert(STAGES % GROUPS == 0, "warpgroups have stages of their own");
static_assert(!ROUNDED || (GROUPED && KIND != 0), "products of codes of one scale are wide_linear.cu's");
static_assert(UNITS % SPAN == 0 && (SPAN == 1 || ROUNDED), "a step has whole spans");
// Where scales are of groups, a step is awaited before the stage of the one before is given back.
static_assert(STAGES >= 2 * GROUPS, "a warpgroup would wait for itself");

using Operand = std::conditional_t<ROUNDED, E4m3, Element>;
constexpr int PRODUCTS_EACH = UNIT / (ROUNDED ? 32 : 16);  // of a unit
constexpr float DIGIT = ROUNDED && KIND == 2 ? 0x1p-9f : 1.0f;  // what a digit is to tensor cores
constexpr float OUT_FACTOR = (ROUNDED ? 1.0f : FACTOR) / DIGIT;

using Sums = float[TURNS][WGMMA_N / 2];
// A thread's four of eight tokens: two neighbouring ones of each of two rows.
__device__ __forceinline__ float* sum(Sums& sums, int block) { return &sums[block * 8 / WGMMA_N][block * 8 % WGMMA_N / 2]; }
