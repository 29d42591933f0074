// Cuts windows out of runs of text.
#include "client/expertctl/train/batch.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/expertctl/train/ops.h"
#include "client/expertctl/train/random.h"

namespace expertd::train {
namespace {

// Appends the window of `run` at `start`; its first `ignored` targets are not scored.
void AppendWindow(const std::string& run, int64_t start, int64_t length, int64_t ignored,
                  Batch* batch) {
  for (int64_t i = 0; i < length; ++i) {
    batch->inputs.push_back(static_cast<uint8_t>(run[start + i]));
    const int next = static_cast<uint8_t>(run[start + i + 1]);
    batch->targets.push_back(i < ignored ? kIgnoredTarget : next);
  }
}

}  // namespace

BatchSampler::BatchSampler(const std::vector<std::string>& runs, const BatchShape& shape,
                           uint64_t seed)
    : runs_(&runs), shape_(shape), seed_(seed) {
  int64_t end = 0;
  for (const std::string& run : runs) {
    end += std::max<int64_t>(0, static_cast<int64_t>(run.size()) - shape.length);
    ends_.push_back(end);
  }
}

absl::StatusOr<BatchSampler> BatchSampler::Create(const std::vector<std::string>& runs,
                                                  const BatchShape& shape, uint64_t seed) {
  if (shape.sequences < 1 || shape.length < 1) {
    return absl::InvalidArgumentError(absl::StrCat("batch shape ", shape.sequences, " x ",
                                                   shape.length, ": both must be positive"));
  }
  BatchSampler sampler(runs, shape, seed);
  if (sampler.ends_.empty() || sampler.ends_.back() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("no contiguous run of text holds ", shape.length + 1, " bytes"));
  }
  return sampler;
}

Batch BatchSampler::Sample(int64_t step) const {
  Batch batch;
  for (int64_t s = 0; s < shape_.sequences; ++s) {
    const uint64_t bits = RandomBits(seed_, static_cast<uint64_t>(step), static_cast<uint64_t>(s));
    const int64_t pick = static_cast<int64_t>(bits % static_cast<uint64_t>(ends_.back()));
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), pick);
    const size_t run = end - ends_.begin();
    AppendWindow((*runs_)[run], run == 0 ? pick : pick - ends_[run - 1], shape_.length, 0, &batch);
  }
  return batch;
}

std::vector<Batch> ValidationBatches(const std::vector<std::string>& runs,
                                     const BatchShape& shape) {
  std::vector<Batch> batches;
  const size_t full = shape.sequences * shape.length;
  for (const std::string& run : runs) {
    const int64_t pairs = static_cast<int64_t>(run.size()) - 1;
    if (pairs < shape.length) continue;
    for (int64_t scored = 0; scored < pairs; scored += shape.length) {
      const int64_t start = std::min(scored, pairs - shape.length);
      if (batches.empty() || batches.back().inputs.size() == full) batches.emplace_back();
      AppendWindow(run, start, shape.length, scored - start, &batches.back());
    }
  }
  if (!batches.empty()) {
    batches.back().inputs.resize(full, 0);
    batches.back().targets.resize(full, kIgnoredTarget);
  }
  return batches;
}

}  // namespace expertd::train
