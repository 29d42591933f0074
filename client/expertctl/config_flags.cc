// Config messages from flags.
#include "client/expertctl/config_flags.h"

#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/tensor.h"

namespace expertd::expertctl {
namespace {

constexpr int64_t kDefaultTokens = 256;
constexpr int64_t kDefaultHidden = 1024;
constexpr int64_t kDefaultTopK = 8;
constexpr int64_t kDefaultExperts = 64;

int64_t Pick(int64_t given, int64_t base, int64_t fallback) {
  if (given >= 0) return given;
  return base != 0 ? base : fallback;
}

absl::StatusOr<v1::DType> ParseFlag(const char* name, const std::string& value) {
  const absl::StatusOr<v1::DType> dtype = client::ParseDType(value);
  if (!dtype.ok()) return UsageError(StrCat("--", name, ": ", dtype.status().message()));
  return *dtype;
}

}  // namespace

void GroupFlags::AddTo(FlagSet* flags) {
  flags->Add("backend", "loopback, gloo, nccl, nccl_lsa; empty: the device's default", &backend);
  flags->Add("dp_size", "data-parallel mesh axis; -1: file or 1", &dp_size);
  flags->Add("ep_size", "expert-parallel mesh axis; -1: file or all hosts", &ep_size);
  flags->Add("max_tokens_per_rank", "-1: file or 256", &max_tokens_per_rank);
  flags->Add("max_recv_rows_per_rank", "-1: file or the worst case", &max_recv_rows_per_rank);
  flags->Add("max_hidden", "-1: file or 1024", &max_hidden);
  flags->Add("max_top_k", "-1: file or 8", &max_top_k);
  flags->Add("max_experts", "-1: file or 64", &max_experts);
  flags->Add("max_token_dtype", "empty: file or f32", &max_token_dtype);
  flags->Add("base_timeout_ms", "longest wait for another rank; -1: file or the daemons' default",
             &base_timeout_ms);
  flags->Add("ticket_memory_bytes", "for kept forwards; -1: file or the daemons' default",
             &ticket_memory_bytes);
}

absl::StatusOr<v1::GroupConfig> GroupFlags::Merge(v1::GroupConfig base) const {
  if (!backend.empty()) base.set_backend(backend);
  base.set_dp_size(Pick(dp_size, base.dp_size(), 1));
  base.set_ep_size(Pick(ep_size, base.ep_size(), 0));
  base.set_max_tokens_per_rank(
      Pick(max_tokens_per_rank, base.max_tokens_per_rank(), kDefaultTokens));
  base.set_max_recv_rows_per_rank(Pick(max_recv_rows_per_rank, base.max_recv_rows_per_rank(), 0));
  base.set_max_hidden(Pick(max_hidden, base.max_hidden(), kDefaultHidden));
  base.set_max_top_k(Pick(max_top_k, base.max_top_k(), kDefaultTopK));
  base.set_max_experts(Pick(max_experts, base.max_experts(), kDefaultExperts));
  base.set_base_timeout_ms(Pick(base_timeout_ms, base.base_timeout_ms(), 0));
  base.set_ticket_memory_bytes(Pick(ticket_memory_bytes, base.ticket_memory_bytes(), 0));
  if (!max_token_dtype.empty()) {
    ASSIGN_OR_RETURN(const v1::DType dtype, ParseFlag("max_token_dtype", max_token_dtype));
    base.set_max_token_dtype(dtype);
  }
  if (base.max_token_dtype() == v1::DTYPE_UNSPECIFIED) base.set_max_token_dtype(v1::DTYPE_F32);
  return base;
}

void LayerFlags::AddTo(FlagSet* flags) {
  flags->Add("experts", "experts of the layer", &experts);
  flags->Add("hidden", "width of a token", &hidden);
  flags->Add("intermediate", "width inside an expert", &intermediate);
  flags->Add("top_k", "experts per token", &top_k);
  flags->Add("alignment", "rows an expert's segment is padded to", &alignment);
  flags->Add("token_dtype", "f32, f16 or bf16", &token_dtype);
  flags->Add("weight_dtype", "f32, f16 or bf16", &weight_dtype);
}

absl::StatusOr<v1::LayerConfig> LayerFlags::Make() const {
  v1::LayerConfig config;
  config.set_expert_count(experts);
  config.set_hidden(hidden);
  config.set_intermediate(intermediate);
  config.set_top_k(top_k);
  config.set_alignment(alignment);
  ASSIGN_OR_RETURN(const v1::DType token, ParseFlag("token_dtype", token_dtype));
  ASSIGN_OR_RETURN(const v1::DType weight, ParseFlag("weight_dtype", weight_dtype));
  config.set_token_dtype(token);
  config.set_weight_dtype(weight);
  return config;
}

}  // namespace expertd::expertctl
