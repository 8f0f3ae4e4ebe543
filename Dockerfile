# The same two commands in a container, as a user without root rights:
#   docker build -t lockstep-gpt .
#   docker run --rm -it lockstep-gpt python3 scripts/dev.py train experiment=smoke
# With GPUs, and runs that stay:
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/runs:/home/user/project/runs" lockstep-gpt
#
# To pin its content too: `docker buildx imagetools inspect python:3.13.7-slim-bookworm` prints the
# digest, which goes behind the tag as @sha256:... It was written where no registry could be asked.
FROM python:3.13.7-slim-bookworm

# git: what of the code a run has; g++: Inductor on CPUs (compile=true). Their versions are those
# of the Debian of the image.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 user \
    && mkdir /home/user/project \
    && chown user:user /home/user/project

USER user
WORKDIR /home/user/project

# Libraries first: they change more rarely than the code. Which build of torch it is, the index
# decides (docs/torch_builds.md): docker build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
COPY --chown=user:user pyproject.toml constraints.txt README.md LICENSE* ./
COPY --chown=user:user configs configs
COPY --chown=user:user scripts scripts
COPY --chown=user:user src src
RUN python3 scripts/dev.py train --help > /dev/null
COPY --chown=user:user docs docs
COPY --chown=user:user tests tests

CMD ["python3", "scripts/dev.py", "train"]
