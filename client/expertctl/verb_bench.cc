// bench: how long operations take as a client of the whole group sees it.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "client/cpp/json.h"
#include "client/expertctl/bench_ops.h"
#include "client/expertctl/common.h"
#include "client/expertctl/config_flags.h"
#include "client/expertctl/layers.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

struct BenchLimits {
  double seconds = 2;  // Per operation.
  int64_t iterations = 30;
  int64_t warmup = 5;
};

// Microseconds of each iteration, sorted. Ends after both limits, or when stopped.
absl::StatusOr<std::vector<double>> Time(const BenchOp& op, const BenchLimits& limits) {
  for (int64_t i = 0; i < limits.warmup; ++i) RETURN_IF_ERROR(op.run());
  std::vector<double> samples;
  const absl::Time end = absl::Now() + absl::Seconds(limits.seconds);
  while (absl::Now() < end || static_cast<int64_t>(samples.size()) < limits.iterations) {
    if (StopFlag()->load()) return absl::CancelledError("stopped");
    const absl::Time start = absl::Now();
    RETURN_IF_ERROR(op.run());
    samples.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
  }
  std::sort(samples.begin(), samples.end());
  return samples;
}

double Percentile(const std::vector<double>& sorted, double fraction) {
  const auto last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<size_t>(last * fraction + 0.5)];
}

std::string RowJson(const BenchOp& op, const BenchSpec& spec, const client::Group& group,
                    const std::vector<double>& samples) {
  client::JsonObject row;
  row.Add("workload", "expertctl")
      .Add("op", op.name)
      .Add("backend", group.infos.front().backend())
      .Add("world", group.world())
      .Add("dtype", v1::DType_Name(spec.config.token_dtype()))
      .Add("tokens_per_rank", spec.tokens)
      .Add("hidden", spec.config.hidden())
      .Add("intermediate", spec.config.intermediate())
      .Add("experts_per_rank", spec.config.expert_count() / group.world())
      .Add("top_k", spec.config.top_k())
      .Add("median_us", Percentile(samples, 0.5))
      .Add("p10_us", Percentile(samples, 0.1))
      .Add("p90_us", Percentile(samples, 0.9))
      .Add("p99_us", Percentile(samples, 0.99))
      .Add("iterations", samples.size())
      .Add("request_bytes", op.request_bytes)
      .Add("response_bytes", op.response_bytes);
  return row.Text();
}

absl::Status TimeAll(const BenchSpec& spec, const client::Group& group, const BenchLimits& limits,
                     bool json) {
  ASSIGN_OR_RETURN(const std::vector<BenchOp> ops, MakeBenchOps(spec, group.clients()));
  if (!json) {
    PrintLine(absl::StrFormat("%-18s %10s %10s %10s %10s %7s", "op", "median us", "p10", "p90",
                              "p99", "runs"));
  }
  for (const BenchOp& op : ops) {
    ASSIGN_OR_RETURN(const std::vector<double> samples, Time(op, limits));
    PrintLine(json ? RowJson(op, spec, group, samples)
                   : absl::StrFormat("%-18s %10.0f %10.0f %10.0f %10.0f %7d", op.name,
                                     Percentile(samples, 0.5), Percentile(samples, 0.1),
                                     Percentile(samples, 0.9), Percentile(samples, 0.99),
                                     samples.size()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int> RunBench(const Args& args) {
  TargetFlags target;
  LayerFlags layer_flags;
  BenchLimits limits;
  BenchSpec spec;
  spec.tokens = 64;
  FlagSet flags("bench",
                "client-seen latency of each operation over a formed group, on a "
                "temporary layer; with --json one row per operation");
  target.AddTo(&flags);
  layer_flags.AddTo(&flags);
  flags.Add("tokens", "tokens per rank", &spec.tokens);
  flags.Add("seconds", "per operation, at least", &limits.seconds);
  flags.Add("iterations", "per operation, at least", &limits.iterations);
  RETURN_IF_ERROR(flags.Parse(args));
  if (spec.tokens < 0 || limits.iterations < 1) {
    return UsageError("need --tokens of 0 or more and --iterations of 1 or more");
  }
  ASSIGN_OR_RETURN(spec.config, layer_flags.Make());
  ASSIGN_OR_RETURN(const Session session, OpenSession(target));
  spec.driver = session.driver.get();
  RETURN_IF_ERROR(
      WithTemporaryLayer("bench", spec.config, session, [&](const v1::LayerInfo& layer) {
        spec.layer_id = layer.layer_id();
        const absl::Status timed = TimeAll(spec, session.group, limits, target.json);
        const absl::Status deleted = DeleteBenchTensors(session.group.clients());
        return timed.ok() ? deleted : timed;
      }));
  return kExitOk;
}

}  // namespace expertd::expertctl
