# Image of the Expertd daemon for CPUs: a build stage, then only what the programs need to run.
#
# docker build -t expertd . && docker run --rm -p 50051:50051 expertd
# tests/deploy/dockerfile_replay.sh carries out these steps without a container engine.
FROM debian:12-slim AS build
WORKDIR /src
COPY . .
RUN ./dev build cpu-only expertd expertctl

FROM debian:12-slim
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates libabsl20220623 libdnnl2 libgloo0 libgrpc++1.51 libmicrohttpd12 \
      libprotobuf32 libssl3 \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin expertd \
 && install -d -o expertd -g expertd -m 0750 /var/lib/expertd
COPY --from=build /src/build/cpu-only/expertd /src/build/cpu-only/expertctl /usr/local/bin/
ENV EXPERTD_LISTEN=0.0.0.0:50051 EXPERTD_PROBE_LISTEN=0.0.0.0:50052 EXPERTD_DATA_DIR=/var/lib/expertd
WORKDIR /var/lib/expertd
USER 10001:10001
EXPOSE 50051 50052
ENTRYPOINT ["/usr/local/bin/expertd"]
