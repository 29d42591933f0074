// Names, units and labels of all metrics.
#include "server/engine_metrics.h"

#include "base/strings.h"
#include "server/observe/metrics.h"
#include "server/version.h"

namespace expertd::server {
namespace {

using observe::MetricsText;
using observe::MetricType;

constexpr double kMicrosPerSecond = 1e6;

void AddProcess(const MetricsSource& source, MetricsText* text) {
  text->Family("expertd_info", MetricType::kGauge, "Facts about the daemon; always 1.");
  text->Sample({{"version", source.version},
                {"slot", StrCat(source.facts.slot)},
                {"device", source.facts.device.kind},
                {"device_name", source.facts.device.name}},
               int64_t{1});
  text->Family("expertd_draining", MetricType::kGauge, "1 while the daemon takes no new work.");
  text->Sample({}, int64_t{source.draining ? 1 : 0});
}

void AddGroup(const MetricsSource& source, MetricsText* text) {
  const engine::GroupInfo& group = source.group;
  text->Family("expertd_group_state", MetricType::kGauge, "1 for the state the group is in.");
  for (const engine::GroupState state :
       {engine::GroupState::kIdle, engine::GroupState::kJoining, engine::GroupState::kReady,
        engine::GroupState::kDraining, engine::GroupState::kBroken}) {
    text->Sample({{"state", engine::GroupStateName(state)}}, int64_t{state == group.state});
  }
  text->Family("expertd_group_epoch", MetricType::kGauge, "Epoch of the group; 0 without one.");
  text->Sample({}, group.epoch);
  text->Family("expertd_group_rank", MetricType::kGauge, "Rank of this daemon in the group.");
  text->Sample({}, group.rank);
  text->Family("expertd_group_ranks", MetricType::kGauge, "Ranks of the group; 0 without one.");
  text->Sample({}, static_cast<uint64_t>(group.members.size()));
  text->Family("expertd_group_next_sequence", MetricType::kGauge,
               "Sequence that the next collective operation must carry.");
  text->Sample({}, group.next_sequence);
  text->Family("expertd_highest_epoch_seen", MetricType::kGauge, "Highest epoch seen so far.");
  text->Sample({}, source.highest_epoch_seen);
  text->Family("expertd_group_memory_bytes", MetricType::kGauge,
               "Derived sizes of the group on this rank.");
  for (const auto& [name, bytes] : group.memory_bytes) text->Sample({{"kind", name}}, bytes);
}

void AddSteps(const engine::EngineCounters& counters, MetricsText* text) {
  text->Family("expertd_steps_total", MetricType::kCounter,
               "Collective operations that ended, by result.");
  text->Sample({{"result", "ok"}}, counters.steps_succeeded);
  text->Sample({{"result", "error"}}, counters.steps_failed);
  text->Family("expertd_step_failures_total", MetricType::kCounter,
               "Collective operations that failed, by reason.");
  for (const auto& [reason, count] : counters.failures_by_reason) {
    text->Sample({{"reason", reason}}, count);
  }
  text->Family("expertd_operations_total", MetricType::kCounter,
               "Collective operations that ended, by method.");
  for (const auto& [name, count] : counters.operations) text->Sample({{"operation", name}}, count);
  text->Family("expertd_operation_seconds_total", MetricType::kCounter,
               "Time of those operations from admission to answer, by method.");
  for (const auto& [name, micros] : counters.operation_micros) {
    text->Sample({{"operation", name}}, static_cast<double>(micros) / kMicrosPerSecond);
  }
  text->Family("expertd_tokens_total", MetricType::kCounter, "Tokens that this rank brought.");
  text->Sample({}, counters.tokens);
  text->Family("expertd_routes_dropped_total", MetricType::kCounter,
               "Routes dropped for capacity at this rank's experts.");
  text->Sample({}, counters.routes_dropped);
}

void AddLoad(const engine::EngineCounters& counters, MetricsText* text) {
  text->Family("expertd_queue_length", MetricType::kGauge,
               "Operations admitted and not yet answered.");
  text->Sample({}, counters.queue_length);
  text->Family("expertd_bytes_in_flight", MetricType::kGauge,
               "Request bytes of operations admitted and not yet answered.");
  text->Sample({}, counters.bytes_in_flight);
  text->Family("expertd_queue_capacity", MetricType::kGauge,
               "Operations that may wait; one more is refused with QUEUE_FULL.");
  text->Sample({}, counters.queue_capacity);
  text->Family("expertd_bytes_in_flight_limit", MetricType::kGauge,
               "Request bytes that may wait; more are refused with BYTES_IN_FLIGHT.");
  text->Sample({}, counters.bytes_in_flight_limit);
  text->Family("expertd_tickets", MetricType::kGauge, "Forwards kept for their backward.");
  text->Sample({}, counters.tickets);
  text->Family("expertd_ticket_bytes", MetricType::kGauge, "Memory of those forwards.");
  text->Sample({}, counters.ticket_bytes);
  text->Family("expertd_tensors", MetricType::kGauge, "Resident tensors.");
  text->Sample({}, counters.tensors);
  text->Family("expertd_tensor_bytes", MetricType::kGauge,
               "Memory of those tensors, of streams that fill one and of deleted ones in use.");
  text->Sample({}, counters.tensor_bytes);
  text->Family("expertd_device_block_allocations_total", MetricType::kCounter,
               "Blocks the device's allocator has handed out; steady steps leave it unchanged.");
  text->Sample({}, counters.device_block_allocations);
}

// One family over all layers; `value` gives a layer's sample.
template <typename Value>
void AddPerLayer(const MetricsSource& source, std::string_view name, MetricType type,
                 std::string_view help, const Value& value, MetricsText* text) {
  text->Family(name, type, help);
  for (const engine::LayerInfo& layer : source.layers) {
    text->Sample({{"layer", layer.layer_id}}, value(layer));
  }
}

void AddPerExpert(const MetricsSource& source, std::string_view name, std::string_view help,
                  std::vector<int64_t> engine::LayerInfo::*counts, MetricsText* text) {
  text->Family(name, MetricType::kCounter, help);
  for (const engine::LayerInfo& layer : source.layers) {
    for (size_t i = 0; i < (layer.*counts).size(); ++i) {
      text->Sample({{"layer", layer.layer_id},
                    {"expert", StrCat(layer.first_expert + static_cast<int64_t>(i))}},
                   (layer.*counts)[i]);
    }
  }
}

void AddLayers(const MetricsSource& source, MetricsText* text) {
  using engine::LayerInfo;
  AddPerLayer(
      source, "expertd_layer_ready", MetricType::kGauge, "1 when the layer has usable weights.",
      [](const LayerInfo& layer) { return int64_t{layer.state == engine::LayerState::kReady}; },
      text);
  AddPerLayer(
      source, "expertd_layer_weights_version", MetricType::kGauge,
      "Version of the layer's weights.",
      [](const LayerInfo& layer) { return layer.weights_version; }, text);
  AddPerLayer(
      source, "expertd_layer_gradients_valid", MetricType::kGauge,
      "0 when a backward failed half-way and gradients must be cleared.",
      [](const LayerInfo& layer) { return int64_t{layer.gradients_valid}; }, text);
  AddPerLayer(
      source, "expertd_layer_forwards_total", MetricType::kCounter,
      "Forwards of the layer since it was created.",
      [](const LayerInfo& layer) { return layer.forwards; }, text);
  AddPerExpert(source, "expertd_expert_routes_total", "Routes that each local expert received.",
               &LayerInfo::routes, text);
  AddPerExpert(source, "expertd_expert_routes_dropped_total",
               "Routes dropped for capacity, by local expert.", &LayerInfo::routes_dropped, text);
}

}  // namespace

MetricsSource ReadMetrics(const engine::Engine& engine) {
  return {.version = Version(),
          .facts = engine.Facts(),
          .group = engine.DescribeGroup(),
          .highest_epoch_seen = engine.HighestEpochSeen(),
          .draining = engine.Draining(),
          .layers = engine.ListLayers(),
          .counters = engine.Counters()};
}

std::string MetricsOf(const MetricsSource& source) {
  MetricsText text;
  AddProcess(source, &text);
  AddGroup(source, &text);
  AddSteps(source.counters, &text);
  AddLoad(source.counters, &text);
  AddLayers(source, &text);
  return text.text();
}

}  // namespace expertd::server
