// forward: one forward of random tokens, and what it cost.
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/json.h"
#include "client/cpp/tensor.h"
#include "client/expertctl/common.h"
#include "client/expertctl/layers.h"
#include "client/expertctl/verbs.h"
#include "client/expertctl/workload.h"

namespace expertd::expertctl {
namespace {

// Root of the mean square of all outputs: says at a glance whether the layer computes anything.
absl::StatusOr<double> OutputRms(const std::vector<v1::ForwardResponse>& responses) {
  double sum = 0;
  double count = 0;
  for (const v1::ForwardResponse& response : responses) {
    ASSIGN_OR_RETURN(const std::vector<float> output, client::ReadFloats(response.output()));
    for (float value : output) sum += static_cast<double>(value) * value;
    count += static_cast<double>(output.size());
  }
  return count > 0 ? std::sqrt(sum / count) : 0.0;
}

void PrintRank(int64_t rank, const v1::StepStats& stats) {
  PrintLine(absl::StrFormat(
      "  rank %d  total %d us: queue %d, arrival %d, stage in %d, prepare %d, dispatch %d, "
      "experts %d, combine %d, stage out %d; routes per expert %s; dropped %d",
      rank, stats.total_us(), stats.queue_us(), stats.arrival_us(), stats.stage_in_us(),
      stats.prepare_us(), stats.dispatch_us(), stats.experts_us(), stats.combine_us(),
      stats.stage_out_us(), absl::StrJoin(stats.tokens_per_expert(), ","), stats.routes_dropped()));
}

}  // namespace

absl::StatusOr<int> RunForward(const Args& args) {
  TargetFlags target;
  std::string layer_id;
  int64_t tokens = 16;
  int64_t seed = 1;
  FlagSet flags("forward", "one forward of random tokens on every rank; prints its statistics");
  target.AddTo(&flags);
  flags.Add("layer", "id; empty: the only layer there is", &layer_id);
  flags.Add("tokens", "tokens per rank", &tokens);
  flags.Add("seed", "of the tokens and the routing", &seed);
  RETURN_IF_ERROR(flags.Parse(args));
  if (tokens < 0) return UsageError("--tokens: need 0 or more");
  ASSIGN_OR_RETURN(const Session session, OpenSession(target));
  ASSIGN_OR_RETURN(const v1::LayerInfo layer,
                   FindLayer(session.group, layer_id, target.QuickOptions()));
  std::vector<v1::ForwardRequest> requests;
  for (int64_t rank = 0; rank < session.group.world(); ++rank) {
    requests.push_back(RandomForward({layer.config(), tokens, static_cast<uint64_t>(seed), rank},
                                     layer.layer_id()));
  }
  const absl::Time start = absl::Now();
  ASSIGN_OR_RETURN(const std::vector<v1::ForwardResponse> responses,
                   session.driver->Run(std::move(requests)));
  const double took_us = absl::ToDoubleMicroseconds(absl::Now() - start);
  ASSIGN_OR_RETURN(const double rms, OutputRms(responses));
  const uint64_t sequence = session.driver->next_sequence() - 1;
  if (!target.json) {
    PrintLine(
        absl::StrFormat("layer %s sequence %d: %d ranks x %d tokens in %.0f us, output rms "
                        "%.4g, aux loss %.4g",
                        layer.layer_id(), sequence, session.group.world(), tokens, took_us, rms,
                        responses.front().aux_loss()));
    for (size_t r = 0; r < responses.size(); ++r) {
      PrintRank(static_cast<int64_t>(r), responses[r].stats());
    }
    return kExitOk;
  }
  std::vector<std::string> ranks;
  for (const v1::ForwardResponse& response : responses) {
    ranks.push_back(client::ToJson(response.stats()));
  }
  client::JsonObject json;
  json.Add("layer_id", layer.layer_id())
      .Add("sequence", sequence)
      .Add("tokens_per_rank", tokens)
      .Add("client_us", took_us)
      .Add("output_rms", rms)
      .Add("aux_loss", responses.front().aux_loss())
      .AddRaw("ranks", client::JsonArray(ranks));
  PrintLine(json.Text());
  return kExitOk;
}

}  // namespace expertd::expertctl
