// Floors, percentiles and JSON of benchmark rows.
#include "tests/bench/row.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "base/strings.h"

namespace expertd::bench {
namespace {

double Percentile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto index = static_cast<size_t>(fraction * static_cast<double>(values.size() - 1) + 0.5);
  return values[index];
}

// A JSON string, or null where the device has no such thing.
std::string OrNull(const std::string& text) {
  return text.empty() ? "null" : StrCat("\"", text, "\"");
}

Work Sum(const Work& a, const Work& b) {
  return {a.wire_bytes + b.wire_bytes, a.memory_bytes + b.memory_bytes, a.flops + b.flops,
          a.messages + b.messages};
}

}  // namespace

double FloorMicros(const Work& work, const Ceilings& ceilings) {
  double floor = 0;
  if (ceilings.wire_gbps > 0) floor = std::max(floor, work.wire_bytes / ceilings.wire_gbps / 1e3);
  if (ceilings.memory_gbps > 0) {
    floor = std::max(floor, work.memory_bytes / ceilings.memory_gbps / 1e3);
  }
  if (ceilings.tflops > 0) floor = std::max(floor, work.flops / ceilings.tflops / 1e6);
  return std::max(floor, work.messages * ceilings.latency_us);
}

Work WorkOf(const std::string& op, const Workload& w, const Traffic& traffic, DType dtype) {
  const auto element = static_cast<double>(DTypeSize(dtype));
  const double row = static_cast<double>(w.hidden) * element;
  const auto tokens = static_cast<double>(w.tokens_per_rank);
  const auto routes = static_cast<double>(traffic.rows_received);
  const auto sent = static_cast<double>(traffic.rows_sent);
  const double matrix = static_cast<double>(w.hidden) * static_cast<double>(w.intermediate);
  const double weights = 3 * matrix * static_cast<double>(w.experts_per_rank);
  if (op == "prepare") {
    // Ids are read once and each route's place is written at both ends; a sent row is announced
    // with 8 bytes; nobody knows what it receives before one message from each rank.
    const double chosen = tokens * static_cast<double>(w.top_k);
    return {sent * 8, chosen * (8 + 4) + routes * 4, 0, 1};
  }
  // Dispatch reads each token once and writes each route's row; combine the reverse.
  if (op == "dispatch" || op == "combine") return {sent * row, (tokens + routes) * row, 0, 1};
  if (op == "round_trip") {
    return Sum(WorkOf("dispatch", w, traffic, dtype), WorkOf("combine", w, traffic, dtype));
  }
  if (op == "experts") {
    // Rows in and out, h and u written and read once, weights read once.
    const double inner = 3 * static_cast<double>(w.intermediate) * element;
    return {0, routes * (2 * row + 2 * inner) + weights * element, 6 * routes * matrix};
  }
  const Work exchanges =
      Sum(WorkOf("dispatch", w, traffic, dtype), WorkOf("combine", w, traffic, dtype));
  const Work forward = Sum(Sum(WorkOf("prepare", w, traffic, dtype), exchanges),
                           WorkOf("experts", w, traffic, dtype));
  if (op == "forward") return forward;
  // Backward: both exchanges again, twice the products, f32 accumulators read and written.
  const Work backward = {exchanges.wire_bytes, 2 * forward.memory_bytes + 8 * weights,
                         2 * forward.flops, exchanges.messages};
  return Sum(forward, backward);
}

std::string ToJson(const Row& row, const Ceilings& ceilings) {
  const double median = Percentile(row.samples_us, 0.5);
  const double floor = FloorMicros(row.work, ceilings);
  const Workload& w = row.workload;
  std::string json = absl::StrFormat(
      R"({"workload": "%s", "op": "%s", "backend": "%s", "mlp": "%s", "world": %d, "dtype": "%s", )"
      R"("tokens_per_rank": %d, "hidden": %d, "intermediate": %d, "experts_per_rank": %d, )"
      R"("top_k": %d, )",
      w.name, row.op, row.backend, row.mlp, row.world, AbslView(DTypeName(row.dtype)),
      w.tokens_per_rank, w.hidden, w.intermediate, w.experts_per_rank, w.top_k);
  absl::StrAppendFormat(
      &json,
      R"("median_us": %.1f, "p10_us": %.1f, "p90_us": %.1f, "iterations": %d, "sms": %s, )"
      R"("wire_bytes": %.0f, "hbm_bytes": %.0f, "flops": %.0f, )",
      median, Percentile(row.samples_us, 0.1), Percentile(row.samples_us, 0.9),
      row.samples_us.size(), row.sms > 0 ? StrCat(row.sms) : "null", row.work.wire_bytes,
      row.work.memory_bytes, row.work.flops);
  if (floor > 0 && median > 0) {
    absl::StrAppendFormat(&json, R"("floor_us": %.1f, "ratio_to_floor": %.2f, )", floor,
                          median / floor);
  } else {
    json += R"("floor_us": null, "ratio_to_floor": null, )";
  }
  const DeviceFacts& device = row.device;
  absl::StrAppendFormat(
      &json,
      R"("correct": %s, "device": "%s", "driver": %s, "cuda": %s, "nccl": %s, "commit": "%s"})",
      row.correct ? "true" : "false", device.name, OrNull(device.driver_version),
      OrNull(device.cuda_runtime), OrNull(device.nccl_version), row.commit);
  return json;
}

}  // namespace expertd::bench
