// The training loop.
#include "client/expertctl/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/expertctl/train/ops.h"

namespace expertd::train {
namespace {

double SteadySeconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

absl::Status Check(const TrainOptions& options) {
  std::string problems;
  const auto require = [&problems](bool good, absl::string_view name, double value,
                                   absl::string_view need) {
    if (!good) absl::StrAppend(&problems, " ", name, "=", value, " must be ", need, ";");
  };
  require(options.steps >= 0, "steps", static_cast<double>(options.steps), "0 or more");
  require(options.seconds >= 0, "seconds", options.seconds, "0 or more");
  require(options.steps > 0 || options.seconds > 0, "steps", 0, "set, or seconds");
  require(options.learning_rate > 0, "learning_rate", options.learning_rate, "positive");
  require(options.expert_learning_rate > 0, "expert_learning_rate", options.expert_learning_rate,
          "positive");
  require(options.warmup >= 0 && options.warmup < 1, "warmup", options.warmup, "in [0, 1)");
  require(options.last_rate >= 0 && options.last_rate <= 1, "last_rate", options.last_rate,
          "in [0, 1]");
  require(options.middle_validations >= 0, "middle_validations",
          static_cast<double>(options.middle_validations), "0 or more");
  require(options.validation_runs > 0, "validation_runs",
          static_cast<double>(options.validation_runs), "positive");
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("training:", problems));
}

// The state of one training; Run is its only entry.
class Trainer {
 public:
  Trainer(const TrainOptions& options, const TrainHooks& hooks, Model* model)
      : options_(options),
        hooks_(hooks),
        model_(model),
        adam_(options.adam, model->parameters()),
        clock_(hooks.clock ? hooks.clock : SteadySeconds),
        start_(clock_()) {
    progress_.steps = options.steps;
  }

  absl::StatusOr<TrainResult> Run(const BatchSampler& sampler,
                                  const std::vector<Batch>& validation);

 private:
  bool Stopped() const { return hooks_.stop != nullptr && hooks_.stop->load(); }
  double Fraction() const;
  absl::Status Step(const Batch& batch);
  absl::Status Validate(const std::vector<Batch>& batches);
  void Report();

  const TrainOptions& options_;
  const TrainHooks& hooks_;
  Model* model_;
  Adam adam_;
  std::function<double()> clock_;
  double start_;
  double validation_seconds_ = 0;  // Duration of the last validation.
  double training_seconds_ = 0;
  int64_t trained_bytes_ = 0;
  Progress progress_;
};

// Time for the last validation is set aside.
double Trainer::Fraction() const {
  double fraction = 0;
  if (options_.steps > 0) {
    fraction = static_cast<double>(progress_.step) / static_cast<double>(options_.steps);
  }
  if (options_.seconds > 0) {
    const double elapsed = clock_() - start_ + validation_seconds_;
    fraction = std::max(fraction, elapsed / options_.seconds);
  }
  return std::min(fraction, 1.0);
}

absl::Status Trainer::Step(const Batch& batch) {
  const double begin = clock_();
  const double factor = LearningRateFactor(options_, Fraction());
  absl::StatusOr<Model::Pass> pass = model_->Forward(batch.inputs, Keep::kForBackward);
  if (!pass.ok()) return pass.status();
  const CrossEntropy loss = SoftmaxCrossEntropy(pass->logits, batch.targets);
  if (absl::Status status = model_->Backward(*pass, loss.gradient); !status.ok()) return status;
  adam_.Step(factor * options_.learning_rate);
  for (MoeLayer* layer : model_->layers()) {
    absl::Status status = layer->Apply(factor * options_.expert_learning_rate);
    if (!status.ok()) return status;
  }
  training_seconds_ += clock_() - begin;
  trained_bytes_ += loss.scored;
  ++progress_.step;
  progress_.loss = loss.sum / static_cast<double>(loss.scored);
  progress_.tokens_per_expert = std::move(pass->tokens_per_expert);
  if (!std::isfinite(progress_.loss)) {
    return absl::InternalError(absl::StrCat("the loss of step ", progress_.step,
                                            " is not finite; lower the learning rates"));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Validate(const std::vector<Batch>& batches) {
  const double begin = clock_();
  const absl::StatusOr<double> loss = Evaluate(batches, model_);
  if (!loss.ok()) return loss.status();
  progress_.validation_loss = *loss;
  validation_seconds_ = clock_() - begin;
  Report();
  return absl::OkStatus();
}

void Trainer::Report() {
  progress_.fraction = Fraction();
  progress_.elapsed_seconds = clock_() - start_;
  if (training_seconds_ > 0) {
    progress_.tokens_per_second = static_cast<double>(trained_bytes_) / training_seconds_;
  }
  if (hooks_.progress) hooks_.progress(progress_);
}

absl::StatusOr<TrainResult> Trainer::Run(const BatchSampler& sampler,
                                         const std::vector<Batch>& validation) {
  if (absl::Status status = Validate(validation); !status.ok()) return status;
  TrainResult result;
  result.first_loss = progress_.validation_loss;
  const double parts = static_cast<double>(options_.middle_validations + 1);
  double next_validation = 1 / parts;
  while (!Stopped() && Fraction() < 1) {
    const absl::Status step = Step(sampler.Sample(progress_.step));
    if (!step.ok()) return step;
    Report();
    if (Fraction() >= next_validation && Fraction() < 1) {
      next_validation = (std::floor(Fraction() * parts) + 1) / parts;
      if (absl::Status status = Validate(validation); !status.ok()) return status;
    }
  }
  result.stopped = Stopped();
  if (absl::Status status = Validate(validation); !status.ok()) return status;
  result.steps = progress_.step;
  result.final_loss = progress_.validation_loss;
  result.tokens_per_second = progress_.tokens_per_second;
  result.elapsed_seconds = progress_.elapsed_seconds;
  return result;
}

}  // namespace

double LearningRateFactor(const TrainOptions& options, double fraction) {
  constexpr double kPi = 3.14159265358979323846;
  // The first step would otherwise be wasted on a rate of zero.
  constexpr double kFirst = 0.01;
  if (fraction < options.warmup) return std::max(kFirst, fraction / options.warmup);
  const double rest = (fraction - options.warmup) / (1 - options.warmup);
  return options.last_rate + (1 - options.last_rate) * 0.5 * (1 + std::cos(kPi * rest));
}

absl::StatusOr<double> Evaluate(const std::vector<Batch>& batches, Model* model) {
  double sum = 0;
  int64_t scored = 0;
  for (const Batch& batch : batches) {
    const absl::StatusOr<Model::Pass> pass = model->Forward(batch.inputs, Keep::kNothing);
    if (!pass.ok()) return pass.status();
    const CrossEntropy loss = SoftmaxCrossEntropy(pass->logits, batch.targets);
    sum += loss.sum;
    scored += loss.scored;
  }
  if (scored == 0) return absl::InvalidArgumentError("nothing to validate on");
  return sum / static_cast<double>(scored);
}

absl::StatusOr<TrainResult> Train(const TrainOptions& options, const Corpus& corpus,
                                  const TrainHooks& hooks, Model* model) {
  if (absl::Status status = Check(options); !status.ok()) return status;
  const BatchShape shape{options.sequences, model->options().length};
  const absl::StatusOr<BatchSampler> sampler =
      BatchSampler::Create(corpus.train, shape, options.seed);
  if (!sampler.ok()) return sampler.status();
  const std::vector<std::string> validation =
      SpreadSample(corpus.validation, options.validation_runs);
  Trainer trainer(options, hooks, model);
  absl::StatusOr<TrainResult> result = trainer.Run(*sampler, ValidationBatches(validation, shape));
  if (result.ok()) result->bigram_entropy = BigramEntropy(validation);
  return result;
}

}  // namespace expertd::train
