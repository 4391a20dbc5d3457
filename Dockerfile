# syntax=docker/dockerfile:1
# An image runs the server (the default), the gateway and every other part of `foretoken`:
#   docker build --target cpu -t foretoken:cpu .
#   docker run --rm --shm-size=1g -p 127.0.0.1:8000-8003:8000-8003 foretoken:cpu
#   docker build --target gpu -t foretoken:gpu .
#   docker run --rm --shm-size=1g --gpus=all -p 127.0.0.1:8000-8003:8000-8003 -v DIR:/model:ro foretoken:gpu serve --host 0.0.0.0 --model /model
# Docker's 64 MB of shared memory are too few for the server's Python stubs; `foretoken serve` says so at start.

# The release whose server the tests run (Triton 2.51).
ARG TRITON_RELEASE=24.10


# -- GPU: NVIDIA's server; kernels are compiled for the GPU at hand at the first start, and kept --------------------------
FROM nvidia/cuda:12.6.3-devel-ubuntu22.04 AS cuda

FROM nvcr.io/nvidia/tritonserver:${TRITON_RELEASE}-py3 AS gpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ make python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
COPY --from=cuda /usr/local/cuda-12.6 /usr/local/cuda-12.6
RUN ldconfig /usr/local/cuda-12.6/lib64 && \
  useradd --uid 10001 --user-group --create-home foretoken && install -d -o foretoken -g foretoken /var/lib/foretoken
ENV PATH=/opt/foretoken/.venv/bin:/usr/local/cuda-12.6/bin:$PATH CUDA_HOME=/usr/local/cuda-12.6
ENV XDG_STATE_HOME=/var/lib XDG_CACHE_HOME=/var/lib/foretoken/cache
WORKDIR /opt/foretoken
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip deploy/setup.sh image && python -m pip install --no-cache-dir pycuda==2026.1 && \
  python -m compileall -q backend client deploy kernels training && \
  python -c "import kernels._load; kernels._load.find_nvcc()"
USER 10001:10001
EXPOSE 8000 8001 8002 8003 8080
# The supervisor's, and the gateway's where there is one: 200 while the models answer real requests. Loading a large model takes minutes.
HEALTHCHECK --interval=10s --timeout=6s --start-period=10m --retries=3 \
  CMD ["python", "-m", "deploy.health", "8003", "8080"]
ENTRYPOINT ["foretoken"]
# To the container's address, or nothing could be published; `-p 127.0.0.1:8000:8000` publishes to the machine alone.
CMD ["serve", "--host", "0.0.0.0"]


# -- CPU: the server of the nvidia-pytriton wheel ---------------------------------------------------------------------
FROM python:3.11-slim-bookworm AS cpu-build
# PyTorch's index of CPU builds makes this image much smaller: without it, pip brings the libraries of a GPU along.
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/foretoken
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip deploy/setup.sh image && .venv/bin/python -m compileall -q backend client deploy kernels training

FROM python:3.11-slim-bookworm AS cpu
RUN useradd --uid 10001 --user-group --create-home foretoken && install -d -o foretoken -g foretoken /var/lib/foretoken
COPY --from=cpu-build /opt/foretoken /opt/foretoken
ENV PATH=/opt/foretoken/.venv/bin:$PATH XDG_STATE_HOME=/var/lib XDG_CACHE_HOME=/var/lib/foretoken/cache
WORKDIR /opt/foretoken
# What was compiled finds its libraries here too.
RUN python -c "from kernels._load_cpu import find_library; assert find_library() is not None"
USER 10001:10001
EXPOSE 8000 8001 8002 8003 8080
HEALTHCHECK --interval=10s --timeout=6s --start-period=2m --retries=3 \
  CMD ["python", "-m", "deploy.health", "8003", "8080"]
ENTRYPOINT ["foretoken"]
# To the container's address, or nothing could be published; `-p 127.0.0.1:8000:8000` publishes to the machine alone.
CMD ["serve", "--host", "0.0.0.0"]
