// The daemon's metrics: what the engine counts, as a Prometheus scrape.
#ifndef SERVER_ENGINE_METRICS_H_
#define SERVER_ENGINE_METRICS_H_

#include <string>
#include <string_view>

#include "server/engine/engine.h"

namespace expertd::server {

// Everything one scrape shows, taken from the engine without touching the device.
struct MetricsSource {
  std::string_view version;
  engine::ServerFacts facts;
  engine::GroupInfo group;
  uint64_t highest_epoch_seen = 0;
  bool draining = false;
  std::vector<engine::LayerInfo> layers;
  engine::EngineCounters counters;
};

MetricsSource ReadMetrics(const engine::Engine& engine);

std::string MetricsOf(const MetricsSource& source);

}  // namespace expertd::server

#endif  // SERVER_ENGINE_METRICS_H_
