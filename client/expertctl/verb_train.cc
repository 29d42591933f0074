// train: a small language model whose MoE layers a group serves; --demo brings its own daemons.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/bootstrap.h"
#include "client/cpp/json.h"
#include "client/expertctl/common.h"
#include "client/expertctl/fleet.h"
#include "client/expertctl/layers.h"
#include "client/expertctl/progress.h"
#include "client/expertctl/served_moe.h"
#include "client/expertctl/train/corpus.h"
#include "client/expertctl/train/model.h"
#include "client/expertctl/train/trainer.h"
#include "client/expertctl/verbs.h"

namespace expertd::expertctl {
namespace {

constexpr int64_t kLayers = 2;
constexpr absl::Duration kStartTimeout = absl::Seconds(60);
constexpr double kDemoSeconds = 150;
constexpr int64_t kDefaultSteps = 500;

struct TrainFlags {
  TargetFlags target;
  int64_t steps = 0;
  double seconds = 0;
  std::string data;
  bool demo = false;
  std::string device = "cpu";
  int64_t world = 0;
  int64_t seed = 1;
  std::string backend;
};

absl::StatusOr<TrainFlags> ParseFlags(const Args& args) {
  TrainFlags flags;
  FlagSet set("train",
              "trains a small byte-level language model with two served MoE layers; the last line "
              "on stdout is one JSON object");
  flags.target.AddTo(&set);
  set.Add("steps", "training steps; 0: no such limit", &flags.steps);
  set.Add("seconds",
          "seconds of training; 0: no such limit (with --demo 150, else 500 steps, when "
          "both are 0)",
          &flags.seconds);
  set.Add("data", "text file or folder; empty: the machine's license texts", &flags.data);
  set.Add("demo", "start --world daemons on this machine, and stop them at the end", &flags.demo);
  set.Add("device", "of --demo's daemons: cpu, or cuda for one GPU each", &flags.device);
  set.Add("world", "daemons of --demo; 0: 4 on cpu, 2 on cuda", &flags.world);
  set.Add("seed", "of weights and batches", &flags.seed);
  set.Add("backend", "of the group that --demo forms; empty: the device's default", &flags.backend);
  RETURN_IF_ERROR(set.Parse(args));
  if (flags.steps < 0 || flags.seconds < 0) {
    return UsageError("need --steps and --seconds of 0 or more");
  }
  if (flags.device != "cpu" && flags.device != "cuda") {
    return UsageError(StrCat("--device: got ", flags.device, ", need cpu or cuda"));
  }
  if (flags.world == 0) flags.world = flags.device == "cpu" ? 4 : 2;
  if (flags.world < 1 || flags.world > 8 || 8 % flags.world != 0) {
    return UsageError(StrCat("--world: got ", flags.world, ", need 1, 2, 4 or 8"));
  }
  if (flags.steps == 0 && flags.seconds == 0) {
    if (flags.demo) {
      flags.seconds = kDemoSeconds;
    } else {
      flags.steps = kDefaultSteps;
    }
  }
  return flags;
}

// Everything that one training needs besides a group.
struct Plan {
  train::ModelOptions model;
  train::TrainOptions train;
  train::Corpus corpus;

  int64_t tokens_per_rank(int64_t world) const {
    return ShardOf(train.sequences * model.length, world, 0).count;
  }
};

absl::StatusOr<Plan> MakePlan(const TrainFlags& flags) {
  Plan plan;
  plan.model.seed = static_cast<uint64_t>(flags.seed);
  plan.train.seed = static_cast<uint64_t>(flags.seed);
  plan.train.steps = flags.steps;
  plan.train.seconds = flags.seconds;
  ASSIGN_OR_RETURN(const std::string text, train::ReadText(flags.data));
  ASSIGN_OR_RETURN(plan.corpus, train::SplitText(text));
  return plan;
}

std::string ResultJson(const train::TrainResult& result, const client::Group& group) {
  client::JsonObject json;
  json.Add("steps", result.steps)
      .Add("first_loss", result.first_loss)
      .Add("final_loss", result.final_loss)
      .Add("bigram_entropy", result.bigram_entropy)
      .Add("tokens_per_second", result.tokens_per_second)
      .Add("elapsed_seconds", result.elapsed_seconds)
      .Add("world", group.world())
      .Add("backend", group.infos.front().backend())
      .Add("stopped", result.stopped);
  return json.Text();
}

// Trains on layers of its own and deletes them again.
absl::StatusOr<train::TrainResult> TrainOn(const Plan& plan, const client::Group& group) {
  client::StepDriver driver(group, {.stop = CancelFlag()});
  const std::string prefix = StrCat("train-", Hex(RandomId()));
  std::vector<std::unique_ptr<ServedMoe>> layers;
  std::vector<train::MoeLayer*> pointers;
  absl::StatusOr<train::TrainResult> result = [&]() -> absl::StatusOr<train::TrainResult> {
    for (int64_t i = 0; i < kLayers; ++i) {
      ServedMoeOptions options;
      options.layer_id = StrCat(prefix, "-", i);
      options.hidden = plan.model.hidden;
      options.experts = plan.model.experts;
      options.seed = plan.model.seed + static_cast<uint64_t>(i);
      ASSIGN_OR_RETURN(layers.emplace_back(), ServedMoe::Create(options, &driver));
      pointers.push_back(layers.back().get());
    }
    ASSIGN_OR_RETURN(const std::unique_ptr<train::Model> model,
                     train::Model::Create(plan.model, pointers));
    ProgressPrinter printer(stderr);
    train::TrainHooks hooks;
    hooks.progress = [&printer](const train::Progress& progress) { printer.Update(progress); };
    hooks.stop = StopFlag();
    auto trained = train::Train(plan.train, plan.corpus, hooks, model.get());
    printer.Finish();
    return trained;
  }();
  client::StepDriver cleaner(group, {.timeout = absl::Seconds(10)});
  cleaner.Distrust();
  for (const auto& layer : layers) {
    if (layer == nullptr) continue;
    const absl::Status deleted = DeleteLayer(layer->layer_id(), &cleaner);
    if (!deleted.ok() && result.ok()) absl::FPrintF(stderr, "%s\n", deleted.message());
    if (!deleted.ok()) break;  // The group is gone; so is the reason to tidy it.
  }
  return result;
}

absl::StatusOr<client::Group> FormDemoGroup(const TrainFlags& flags, const Plan& plan,
                                            const std::vector<std::string>& hosts) {
  client::UpRequest request;
  request.group_id = "demo";
  request.hosts = hosts;
  request.claimant = client::MakeClaimant();
  request.config.set_dp_size(1);
  request.config.set_backend(flags.backend);
  request.config.set_max_tokens_per_rank(plan.tokens_per_rank(flags.world));
  request.config.set_max_hidden(plan.model.hidden);
  request.config.set_max_experts(plan.model.experts);
  request.config.set_max_top_k(ServedMoeOptions().top_k);
  request.config.set_max_token_dtype(v1::DTYPE_F32);
  return client::Up(request, {.deadline = absl::Now() + kStartTimeout, .stop = StopFlag()});
}

// Prints the result as the last line, whatever the fleet wrote before.
int Report(const train::TrainResult& result, const client::Group& group) {
  absl::FPrintF(stderr,
                "%d steps in %.1f s: validation loss %.3f -> %.3f nats per byte "
                "(no bigram model gets below %.3f), %.0f tokens/s\n",
                result.steps, result.elapsed_seconds, result.first_loss, result.final_loss,
                result.bigram_entropy, result.tokens_per_second);
  PrintLine(ResultJson(result, group));
  return result.stopped ? kExitInterrupted : kExitOk;
}

absl::StatusOr<int> RunDemo(const TrainFlags& flags) {
  ASSIGN_OR_RETURN(const Plan plan, MakePlan(flags));
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Fleet> fleet,
      Fleet::Start(BesideSelf("expertd"), flags.device, flags.world, absl::Now() + kStartTimeout));
  absl::FPrintF(stderr, "%d daemons listen on", flags.world);
  for (const std::string& host : fleet->hosts()) absl::FPrintF(stderr, " %s", host);
  absl::FPrintF(stderr, "\n");
  std::optional<client::Group> group;
  absl::StatusOr<train::TrainResult> result = [&]() -> absl::StatusOr<train::TrainResult> {
    ASSIGN_OR_RETURN(group, FormDemoGroup(flags, plan, fleet->hosts()));
    absl::FPrintF(stderr, "group %s epoch %d: %d ranks over %s\n", group->id(), group->epoch(),
                  group->world(), group->infos.front().backend());
    return TrainOn(plan, *group);
  }();
  if (!result.ok() && !StopFlag()->load()) absl::FPrintF(stderr, "%s", fleet->Describe());
  if (result.ok()) {
    // In order where possible; the daemons end in any case.
    (void)client::Down(fleet->hosts(), {.deadline = absl::Now() + absl::Seconds(5),
                                        .retry_window = absl::ZeroDuration()});
  }
  fleet->Stop();
  if (!result.ok()) return result.status();
  return Report(*result, *group);
}

}  // namespace

absl::StatusOr<int> RunTrain(const Args& args) {
  ASSIGN_OR_RETURN(TrainFlags flags, ParseFlags(args));
  if (flags.demo) return RunDemo(flags);
  ASSIGN_OR_RETURN(const Session session, OpenSession(flags.target));
  ASSIGN_OR_RETURN(const Plan plan, MakePlan(flags));
  ASSIGN_OR_RETURN(const train::TrainResult result, TrainOn(plan, session.group));
  return Report(result, session.group);
}

}  // namespace expertd::expertctl
