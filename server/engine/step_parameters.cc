// Operations on layers and their parameters: create, delete, and the all-or-none apply.
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/ids.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "server/engine/step_runner.h"
#include "server/engine/step_validation.h"

namespace expertd::engine {
namespace {

void AppendFields(std::vector<ConfigField>& fields, std::vector<ConfigField> more) {
  for (ConfigField& field : more) fields.push_back(std::move(field));
}

MlpConfig MlpConfigOf(const LayerConfig& layer, int64_t world) {
  MlpConfig config;
  config.local_experts = layer.expert_count / world;
  config.hidden = layer.hidden;
  config.intermediate = layer.intermediate;
  config.activation = layer.activation;
  config.weighting = layer.weighting;
  config.gate_up_bias = layer.gate_up_bias;
  config.down_bias = layer.down_bias;
  config.token_dtype = layer.token_dtype;
  config.weight_dtype = layer.weight_dtype;
  return config;
}

absl::Status CheckRecipe(const LayerConfig& layer, const Device& device) {
  std::string known;
  for (const Support& recipe : ListRecipes(device)) {
    if (recipe.name == layer.recipe) {
      if (recipe.supported) return absl::OkStatus();
      return Error(Reason::kRecipeUnsupported)
          .Text("recipe ", layer.recipe, " is not supported here: ", recipe.reason)
          .With("recipe", layer.recipe);
    }
    StrAppend(&known, known.empty() ? "" : ", ", recipe.name);
  }
  return Error(Reason::kRecipeUnsupported)
      .Text("recipe is unknown: got ", layer.recipe, ", need one of ", known)
      .With("recipe", layer.recipe);
}

// A layer made in another mesh has buffers of another size: no new values can make it fit.
absl::Status CheckPlacement(const LayerInfo& info, const GroupSession& session) {
  const int64_t local = info.config.expert_count / session.world;
  if (local * session.world == info.config.expert_count && info.local_experts == local &&
      info.first_expert == session.rank * local) {
    return absl::OkStatus();
  }
  return Error(Reason::kLayerNeedsRestore)
      .Text("layer ", info.layer_id, " was made for another mesh: got ", info.local_experts,
            " experts from ", info.first_expert, ", need ", local, " from ", session.rank * local,
            "; DeleteLayer, then CreateLayer")
      .With("layer_id", info.layer_id);
}

}  // namespace

// One rank's say about its gradients, exchanged before anything is applied.
struct StepRunner::GradientVote {
  double expert_squares = 0;      // sum of squares over this rank's experts
  double replicated_squares = 0;  // the same on every rank, counted once
  std::string non_finite;         // name of a parameter with a NaN or infinity; empty: none

  std::string Encode() const {
    std::string bytes(2 * sizeof(double), '\0');
    std::memcpy(bytes.data(), &expert_squares, sizeof(double));
    std::memcpy(bytes.data() + sizeof(double), &replicated_squares, sizeof(double));
    return bytes + non_finite;
  }
  static absl::StatusOr<GradientVote> Decode(std::string_view bytes) {
    GradientVote vote;
    if (bytes.size() < 2 * sizeof(double)) {
      return Error(Reason::kInternal).Text("a peer sent a gradient vote that cannot be read");
    }
    std::memcpy(&vote.expert_squares, bytes.data(), sizeof(double));
    std::memcpy(&vote.replicated_squares, bytes.data() + sizeof(double), sizeof(double));
    vote.non_finite = std::string(bytes.substr(2 * sizeof(double)));
    return vote;
  }
};

absl::Status StepRunner::CheckParameters(Operation& op, Step& step) {
  switch (op.kind) {
    case OpKind::kCreateLayer:
      return CheckCreateLayer(static_cast<CreateLayerOp&>(op), step);
    case OpKind::kInitializeWeights: {
      auto& init = static_cast<InitializeWeightsOp&>(op);
      op.arguments = {{"seed", StrCat(init.seed)}};
      RETURN_IF_ERROR(FindLayer(init.layer_id, step));
      return CheckPlacement(step.layer->info(), session_);
    }
    case OpKind::kConfigureOptimizer: {
      auto& configure = static_cast<ConfigureOptimizerOp&>(op);
      configure.optimizer = WithDefaults(configure.optimizer);
      op.arguments = FieldsOf(configure.optimizer);
      RETURN_IF_ERROR(FindLayer(configure.layer_id, step));
      if (step.layer->info().frozen) {
        return Error(Reason::kConfigInvalid)
            .Text("layer ", configure.layer_id, " is frozen: it takes no optimizer");
      }
      return ValidateOptimizerConfig(configure.optimizer);
    }
    case OpKind::kApplyGradients: {
      auto& apply = static_cast<ApplyGradientsOp&>(op);
      op.arguments = {{"expected_version", StrCat(apply.expected_version)},
                      {"learning_rate", StrCat(apply.learning_rate)},
                      {"gradient_scale", StrCat(apply.gradient_scale)}};
      RETURN_IF_ERROR(FindLayer(apply.layer_id, step));
      AppendFields(op.arguments, FieldsOf(step.layer->config().optimizer));
      return ValidateApply(apply, step.layer->info());
    }
    default:
      return FindLayer(static_cast<LayerOp&>(op).layer_id, step);
  }
}

absl::Status StepRunner::CheckCreateLayer(CreateLayerOp& op, Step& step) {
  RETURN_IF_ERROR(ValidateLayerId(op.layer_id));
  op.config = WithDefaults(op.config);
  op.arguments = {{"layer_id", op.layer_id}};
  AppendFields(op.arguments, FieldsOf(op.config));
  AppendFields(op.arguments, FieldsOf(op.config.optimizer));
  RETURN_IF_ERROR(WithPathPrefix(
      ValidateLayerConfig(op.config, session_.config, state_.device->facts().kind == "cuda"),
      "config."));
  RETURN_IF_ERROR(CheckRecipe(op.config, *state_.device));
  auto existing = state_.layers.find(op.layer_id);
  if (existing != state_.layers.end()) {
    const LayerInfo& info = existing->second->info();
    std::vector<ConfigField> here = FieldsOf(info.config);
    AppendFields(here, FieldsOf(info.config.optimizer));
    std::vector<ConfigField> asked = FieldsOf(op.config);
    AppendFields(asked, FieldsOf(op.config.optimizer));
    const absl::Status difference =
        CompareFields(Reason::kLayerExists, "the config", {here, asked});
    if (difference.ok()) return absl::OkStatus();
    return Error(Reason::kLayerExists)
        .Text("layer ", op.layer_id, " exists with another config (rank 0: here, rank 1: asked): ",
              StdView(difference.message()))
        .With("layer_id", op.layer_id);
  }
  // First: its arithmetic is checked, so that no size below can overflow.
  const auto plan = PlanLayer(SizesOf(session_.config), SizesOf(op.config, false));
  if (!plan.ok()) return WithPathPrefix(TooLarge(plan.status()), "config");
  ASSIGN_OR_RETURN(
      std::unique_ptr<ExpertMlp> mlp,
      CreateExpertMlp(state_.expert_mlp, *state_.device, MlpConfigOf(op.config, session_.world)));
  ASSIGN_OR_RETURN(step.created, Layer::Create(op.layer_id, op.config, session_.rank,
                                               session_.world, *state_.device, std::move(mlp)));
  return PlanMemory(*step.created);
}

absl::Status StepRunner::PlanMemory(Layer& layer) {
  LayerInfo& info = layer.info();
  ASSIGN_OR_RETURN(info.memory_bytes,
                   PlanLayer(SizesOf(session_.config), SizesOf(info.config, info.frozen)));
  return absl::OkStatus();
}

absl::Status StepRunner::CreateLayer(CreateLayerOp& op, Step& step) {
  const bool fresh = step.created != nullptr;
  if (fresh) state_.layers[op.layer_id] = std::move(step.created);
  Layer& layer = *state_.layers[op.layer_id];
  op.layer = layer.info();
  if (state_.device->facts().kind == "cpu") return absl::OkStatus();
  // Ranks may differ in `fresh`: only what stays on this rank depends on it.
  RETURN_IF_ERROR(RehearseExchange(step, layer.config()));
  if (!fresh) return absl::OkStatus();
  RETURN_IF_ERROR(RehearseRouter(layer));
  return RehearseExperts(layer);
}

absl::Status StepRunner::DeleteLayer(LayerOp& op, Step&) {
  std::erase_if(session_.handles.states(),
                [&](const auto& entry) { return entry.second.layer_id == op.layer_id; });
  std::erase_if(session_.tickets.states(), [&](const auto& entry) {
    if (entry.second.layer_id != op.layer_id) return false;
    session_.ticket_bytes -= entry.second.bytes;
    return true;
  });
  state_.layers.erase(op.layer_id);
  return absl::OkStatus();
}

absl::StatusOr<StepRunner::GradientVote> StepRunner::InspectGradients(
    Step& step, std::vector<DeviceBuffer>& reduced) {
  GradientVote vote;
  for (Parameter& parameter : step.layer->parameters()) {
    DeviceBuffer sum;
    const float* gradient = parameter.gradient.as<float>();
    if (parameter.replicated && parameter.trained) {
      // Into a copy: when no rank applies, the accumulator must still hold this rank's part alone.
      ASSIGN_OR_RETURN(sum, state_.device->Allocate(parameter.gradient.size()));
      RETURN_IF_ERROR(state_.device->CopyOnDevice(sum.data(), gradient, sum.size()));
      RETURN_IF_ERROR(
          session_.backend->AllReduceSum(step.context, sum.as<float>(), parameter.count));
      gradient = sum.as<float>();
    }
    ASSIGN_OR_RETURN(const GradientFacts facts, state_.optim->Inspect(gradient, parameter.count));
    (parameter.replicated ? vote.replicated_squares : vote.expert_squares) += facts.sum_of_squares;
    if (!facts.finite) vote.non_finite = parameter.name;
    reduced.push_back(std::move(sum));
  }
  return vote;
}

absl::Status StepRunner::AgreeOnNorm(ApplyGradientsOp& op, Step& step, const GradientVote& vote) {
  std::vector<std::string> votes = {vote.Encode()};
  if (session_.world > 1) {
    ASSIGN_OR_RETURN(votes, session_.exchange->Gather("apply", op.header.sequence, votes[0],
                                                      step.context.deadline, /*patient=*/false));
  }
  double squares = vote.replicated_squares;
  for (size_t rank = 0; rank < votes.size(); ++rank) {
    ASSIGN_OR_RETURN(const GradientVote other, GradientVote::Decode(votes[rank]));
    if (!other.non_finite.empty()) {
      return Error(Reason::kNonFiniteGradient)
          .Text("gradient of ", other.non_finite, " on rank ", rank,
                " holds a NaN or an infinity: no rank applied")
          .With("rank", rank)
          .With("parameter", other.non_finite);
    }
    squares += other.expert_squares;
  }
  op.gradient_norm = std::sqrt(squares) * op.gradient_scale;
  return absl::OkStatus();
}

absl::Status StepRunner::ApplyGradients(ApplyGradientsOp& op, Step& step) {
  Layer& layer = *step.layer;
  LayerInfo& info = layer.info();
  if (op.gradient_scale == 0) op.gradient_scale = 1;
  op.weights_version = info.weights_version;
  op.durable_version = info.durable_version;
  if (info.weights_version == op.expected_version + 1) return absl::OkStatus();

  std::vector<DeviceBuffer> reduced;
  ASSIGN_OR_RETURN(const GradientVote vote, InspectGradients(step, reduced));
  RETURN_IF_ERROR(AgreeOnNorm(op, step, vote));
  std::vector<Parameter>& parameters = layer.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (reduced[i].data() == nullptr) continue;
    RETURN_IF_ERROR(state_.device->CopyOnDevice(parameters[i].gradient.data(), reduced[i].data(),
                                                reduced[i].size()));
  }
  const double limit = info.config.optimizer.max_gradient_norm;
  double scale = op.gradient_scale;
  if (limit > 0 && op.gradient_norm > limit) scale *= limit / op.gradient_norm;
  RETURN_IF_ERROR(layer.Apply(op.learning_rate, scale, *state_.optim));
  info.weights_lineage = Fingerprint(
      StrCat(info.weights_lineage, "\napply ", session_.epoch, " ", op.header.sequence));
  op.weights_version = info.weights_version;
  op.applied = true;
  return absl::OkStatus();
}

}  // namespace expertd::engine
