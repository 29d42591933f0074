// Shows how a training goes: one line that is redrawn on a terminal, a line now and then elsewhere.
#ifndef CLIENT_EXPERTCTL_PROGRESS_H_
#define CLIENT_EXPERTCTL_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/expertctl/train/trainer.h"

namespace expertd::expertctl {

// One block character per expert, as high as its part of the fullest expert's routes.
std::string LoadBar(const std::vector<int64_t>& routes);

// "[#####     ]  50%  step 120  loss 1.234  validation 1.300  5321 tokens/s  experts ..." without a
// line end. Losses are nats per byte.
std::string ProgressLine(const train::Progress& progress);

// The first `columns` characters of UTF-8 text, each taken to be one column wide.
std::string FirstColumns(const std::string& text, size_t columns);

class ProgressPrinter {
 public:
  // Writes to `out`, redrawing when it is a terminal.
  explicit ProgressPrinter(std::FILE* out);
  void Update(const train::Progress& progress);
  // Shows the last state and ends the redrawn line, so that other text may follow.
  void Finish();

 private:
  void Write();

  std::FILE* out_;
  bool terminal_;
  std::string latest_;  // Not shown yet; empty when it was.
  absl::Time next_ = absl::InfinitePast();
};

}  // namespace expertd::expertctl

#endif  // CLIENT_EXPERTCTL_PROGRESS_H_
