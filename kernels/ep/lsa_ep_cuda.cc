// LsaEp: forming, the limits of an operation, and what stopped kernels report.
#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/memory_plan.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "kernels/cuda/status.h"
#include "kernels/ep/lsa_ep.h"

namespace expertd {
namespace {

// Kernels that are told to stop do so within this, and say for whom they waited.
constexpr std::chrono::milliseconds kStopGrace{20};
constexpr std::chrono::seconds kAbortBound{2};

uint64_t LoadWord(uint64_t& word) {
  return std::atomic_ref<uint64_t>(word).load(std::memory_order_acquire);
}

absl::Status CancelledStatus(const EpGroupConfig& config, uint64_t sequence) {
  return Error(Reason::kCancelled)
      .Text("rank ", config.rank, ": sequence ", sequence, " was cancelled")
      .With("sequence", sequence);
}

// Objects past a point in time.
class Until final : public WaitGuard {
 public:
  explicit Until(SteadyTime until) : until_(until) {}
  absl::Status Check() override {
    if (Clock::Real().Now() < until_) return absl::OkStatus();
    return Error(Reason::kInternal).Text("kernels did not end when told to");
  }

 private:
  const SteadyTime until_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LsaEp>> LsaEp::Create(const EpGroupConfig& config,
                                                     const EpBootstrap& bootstrap,
                                                     CudaDevice& device) {
  RETURN_IF_ERROR(CheckLsaConfig(config));
  std::unique_ptr<LsaEp> made(new LsaEp(config, device));
  RETURN_IF_ERROR(made->Open(bootstrap));
  return made;
}

absl::Status LsaEp::Open(const EpBootstrap& bootstrap) {
  capabilities_.name = "nccl_lsa";
  capabilities_.survives_cancel = true;
  capabilities_.multi_process = true;
  capabilities_.max_world = kLsaMaxWorld;
  epoch_ = bootstrap.epoch;
  RETURN_IF_ERROR(device_.MakeCurrent());
  ASSIGN_OR_RETURN(
      layout_,
      PlanWindow({.ranks = config_.world,
                  .max_tokens_per_rank = config_.max_tokens_per_rank,
                  .max_hidden = config_.max_hidden,
                  .max_top_k = config_.max_top_k,
                  .token_bytes = static_cast<int64_t>(DTypeSize(config_.max_token_dtype))}));
  ASSIGN_OR_RETURN(done_, CreateEvent());
  ASSIGN_OR_RETURN(pinned_words_, AllocatePinned(sizeof(LsaHostWords)));
  words_ = new (pinned_words_.get()) LsaHostWords;
  ASSIGN_OR_RETURN(device_words_, device_.Allocate(sizeof(LsaDeviceWords)));
  RETURN_IF_ERROR(device_.Zero(device_words_.data(), sizeof(LsaDeviceWords)));
  const int64_t cells = LsaRecordCells(config_.world * (kRecordHeader + config_.max_experts));
  ASSIGN_OR_RETURN(pinned_record_,
                   AllocatePinned(cells * static_cast<int64_t>(sizeof(LsaRecordCell))));
  std::fill_n(static_cast<LsaRecordCell*>(pinned_record_.get()), cells, LsaRecordCell());
  ASSIGN_OR_RETURN(window_, LsaWindow::Create(config_, bootstrap, device_, layout_.bytes));
  device_.AddGuard(this);
  return absl::OkStatus();
}

LsaEp::~LsaEp() {
  Abort();
  device_.RemoveGuard(this);
}

// Raises `word` to `mark`; kernels see it within a millisecond. Any thread.
void LsaEp::StopKernels(uint64_t LsaHostWords::*word, uint64_t mark) {
  std::atomic_ref<uint64_t> shared(words_->*word);
  uint64_t old = shared.load();
  while (old < mark && !shared.compare_exchange_weak(old, mark)) {
  }
}

void LsaEp::Cancel(uint64_t sequence) { StopKernels(&LsaHostWords::cancelled, LsaMark(sequence)); }

void LsaEp::Abort() {
  if (aborted_ || words_ == nullptr) return;
  aborted_ = true;
  StopKernels(&LsaHostWords::cancelled, UINT64_MAX);
  static_cast<void>(device_.MakeCurrent());
  if (running_) {
    Until bound(Clock::Real().Now() + kAbortBound);
    static_cast<void>(PollEvent(done_, &bound));
    running_ = false;
  }
  window_.reset();
}

absl::Status LsaEp::CheckAlive() const {
  if (!aborted_) return absl::OkStatus();
  return Error(Reason::kGroupBroken)
      .Text("rank ", config_.rank, ": the group's windows were given up");
}

absl::Status LsaEp::Begin(const OpContext& context) {
  RETURN_IF_ERROR(CheckAlive());
  RETURN_IF_ERROR(device_.MakeCurrent());
  if (context.sequence != context_.sequence || ordinal_ == 0) {
    failure_ = absl::OkStatus();
    ordinal_ = 0;
  }
  context_ = context;
  RETURN_IF_ERROR(failure_);
  RETURN_IF_ERROR(Report());  // also of an earlier sequence, when nobody waited for its end
  return CheckLimits();
}

absl::StatusOr<LsaOp> LsaEp::NextOp(Part part) {
  if (++ordinal_ == kLsaMaxOrdinal) {
    return Error(Reason::kInternal)
        .Text("sequence ", context_.sequence, " has more than ", kLsaMaxOrdinal - 1, " operations");
  }
  LsaOp op;
  op.rank = static_cast<int32_t>(config_.rank);
  op.world = static_cast<int32_t>(config_.world);
  std::copy(window_->bases().begin(), window_->bases().end(), op.windows);
  op.layout = layout_;
  op.tag = LsaTag(epoch_, context_.sequence, ordinal_);
  op.mark = LsaMark(context_.sequence);
  op.gate = std::exchange(gates_[part], op.tag);
  op.budget_ns = std::max<int64_t>((context_.deadline - Clock::Real().Now()).count(), 1);
  op.host = words_;
  op.device = device_words_.as<LsaDeviceWords>();
  return op;
}

absl::Status LsaEp::Queued(cudaError_t launched, std::string_view what) {
  RETURN_IF_ERROR(CudaStatus(launched, what));
  RETURN_IF_ERROR(Record(done_, device_.stream()));
  running_ = true;
  return absl::OkStatus();
}

absl::Status LsaEp::Fail(absl::Status why) {
  failure_ = why;
  told_ = LsaMark(context_.sequence);
  return why;
}

absl::Status LsaEp::StoppedStatus(uint64_t sequence) const {
  const auto stop = static_cast<LsaStop>(words_->stop);
  const int32_t peer = words_->peer;
  if (stop == LsaStop::kPeerLeft) {
    return Error(Reason::kPeerLost)
        .Text("rank ", config_.rank, ": rank ", peer, " has left sequence ", sequence)
        .With("rank", peer)
        .With("sequence", sequence);
  }
  if (LoadWord(words_->cancelled) >= LsaMark(sequence)) return CancelledStatus(config_, sequence);
  return Error(Reason::kStepTimeout)
      .Text("rank ", config_.rank, ": sequence ", sequence,
            " passed its deadline waiting for rank ", peer)
      .With("rank", peer)
      .With("sequence", sequence);
}

absl::Status LsaEp::Report() {
  const uint64_t mark = LoadWord(words_->mark);
  if (mark <= told_) return absl::OkStatus();
  return Fail(StoppedStatus(mark - 1));
}

absl::Status LsaEp::Finished() {
  if (running_ && cudaEventQuery(done_.get()) != cudaErrorNotReady) running_ = false;
  return Report();
}

absl::Status LsaEp::Check() {
  if (!running_) return absl::OkStatus();
  RETURN_IF_ERROR(Finished());
  return running_ ? CheckLimits() : absl::OkStatus();
}

absl::Status LsaEp::CheckLimits() {
  // Once it was told, whoever waits now waits for something else.
  if (told_ == LsaMark(context_.sequence)) return absl::OkStatus();
  if (LoadWord(words_->cancelled) >= LsaMark(context_.sequence)) {
    return Fail(CancelledStatus(config_, context_.sequence));
  }
  const SteadyTime now = Clock::Real().Now();
  if (now < context_.deadline) return absl::OkStatus();
  if (running_) {
    // A kernel that waits knows for whom; one that did not start in time does not.
    StopKernels(&LsaHostWords::expired, LsaMark(context_.sequence));
    if (now < context_.deadline + kStopGrace) return absl::OkStatus();
  }
  return Fail(Error(Reason::kStepTimeout)
                  .Text("rank ", config_.rank, ": sequence ", context_.sequence,
                        " passed its deadline on the device")
                  .With("sequence", context_.sequence));
}

absl::Status LsaEp::AllReduceSum(const OpContext& context, float* data, int64_t count) {
  RETURN_IF_ERROR(Begin(context));
  if (config_.world == 1) return absl::OkStatus();
  for (int64_t done = 0; done < count; done += kLsaSumCount) {
    ASSIGN_OR_RETURN(const LsaOp op, NextOp(kSumPart));
    RETURN_IF_ERROR(Queued(
        LaunchLsaSum(op, data + done, std::min(kLsaSumCount, count - done), device_.stream()),
        "adding in rank order"));
  }
  return absl::OkStatus();
}

}  // namespace expertd
