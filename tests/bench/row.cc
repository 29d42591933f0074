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

Work Sum(const Work& a, const Work& b) {
  return {a.wire_bytes + b.wire_bytes, a.memory_bytes + b.memory_bytes, a.flops + b.flops};
}

}  // namespace

double FloorMicros(const Work& work, const Ceilings& ceilings) {
  double floor = 0;
  if (ceilings.wire_gbps > 0) floor = std::max(floor, work.wire_bytes / ceilings.wire_gbps / 1e3);
  if (ceilings.memory_gbps > 0) {
    floor = std::max(floor, work.memory_bytes / ceilings.memory_gbps / 1e3);
  }
  if (ceilings.tflops > 0) floor = std::max(floor, work.flops / ceilings.tflops / 1e6);
  return floor;
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
    return {0, tokens * static_cast<double>(w.top_k) * 8, 0};
  }
  // Dispatch reads each token once and writes each route's row; combine the reverse.
  if (op == "dispatch" || op == "combine") return {sent * row, (tokens + routes) * row, 0};
  if (op == "experts") {
    // Rows in and out, h and u written and read once, weights read once.
    const double inner = 3 * static_cast<double>(w.intermediate) * element;
    return {0, routes * (2 * row + 2 * inner) + weights * element, 6 * routes * matrix};
  }
  const Work forward =
      Sum(Sum(WorkOf("dispatch", w, traffic, dtype), WorkOf("combine", w, traffic, dtype)),
          WorkOf("experts", w, traffic, dtype));
  if (op == "forward") return forward;
  // Backward: both exchanges again, twice the products, f32 accumulators read and written.
  const Work backward = {forward.wire_bytes, 2 * forward.memory_bytes + 8 * weights,
                         2 * forward.flops};
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
      R"("median_us": %.1f, "p10_us": %.1f, "p90_us": %.1f, "iterations": %d, "sms": null, )"
      R"("wire_bytes": %.0f, "hbm_bytes": %.0f, "flops": %.0f, )",
      median, Percentile(row.samples_us, 0.1), Percentile(row.samples_us, 0.9),
      row.samples_us.size(), row.work.wire_bytes, row.work.memory_bytes, row.work.flops);
  if (floor > 0 && median > 0) {
    absl::StrAppendFormat(&json, R"("floor_us": %.1f, "ratio_to_floor": %.2f, )", floor,
                          median / floor);
  } else {
    json += R"("floor_us": null, "ratio_to_floor": null, )";
  }
  absl::StrAppendFormat(&json, R"("correct": %s, "device": "%s", "commit": "%s"})",
                        row.correct ? "true" : "false", row.device.name, row.commit);
  return json;
}

}  // namespace expertd::bench
