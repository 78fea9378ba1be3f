# Images that train, with the tested versions of constraints.txt. No image was built where the tests run: hadolint reads
# this file there, and that is all.
#
#   docker build -t effilaunch .                  for NVIDIA GPUs; --build-arg CUDA=13.1.1-cudnn-devel-ubuntu24.04 for a
#                                                 base with nvcc, which offload to NVMe and ZeRO++ compile with
#   docker build -t effilaunch --target cpu .     for CPUs: rehearsals, `run --tiny`, CI
ARG CUDA=13.1.1-cudnn-runtime-ubuntu24.04

FROM python:3.12-slim-trixie AS cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# DeepSpeed compiles its Adam for CPUs, and its reads from NVMe.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libaio-dev openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/effilaunch
COPY . .
# Of two builds of one version pip takes the one with a local label, `+cpu`.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -c constraints.txt '.[train,dpo,embedding,metrics,trackers,s3]'
WORKDIR /work
ENTRYPOINT ["effilaunch"]

FROM nvidia/cuda:${CUDA} AS cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libaio-dev openssh-client pdsh python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:${PATH}
WORKDIR /opt/effilaunch
COPY . .
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir -c constraints.txt '.[train,dpo,embedding,metrics,trackers,s3]'
WORKDIR /work
ENTRYPOINT ["effilaunch"]
