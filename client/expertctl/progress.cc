// Drawing of the progress line.
#include "client/expertctl/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/strings.h"

namespace expertd::expertctl {
namespace {

constexpr absl::Duration kRedraw = absl::Milliseconds(100);
constexpr absl::Duration kLineEvery = absl::Seconds(5);
constexpr int kBarWidth = 20;

// A line that wraps could not be redrawn.
size_t Columns(std::FILE* out) {
  winsize size = {};
  const bool known = ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  return known ? size.ws_col - 1u : 79u;
}

}  // namespace

std::string LoadBar(const std::vector<int64_t>& routes) {
  constexpr const char* kBlocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  int64_t most = 1;
  for (int64_t count : routes) most = std::max(most, count);
  std::string bar;
  for (int64_t count : routes) bar += kBlocks[(count * 8 + most - 1) / most];
  return bar;
}

std::string ProgressLine(const train::Progress& progress) {
  const int filled = static_cast<int>(std::clamp(progress.fraction, 0.0, 1.0) * kBarWidth);
  std::string line = absl::StrFormat(
      "[%s%s] %3.0f%%  step %d  loss %.3f  validation %.3f  %.0f tokens/s",
      std::string(filled, '#'), std::string(kBarWidth - filled, ' '), 100 * progress.fraction,
      progress.step, progress.loss, progress.validation_loss, progress.tokens_per_second);
  if (!progress.tokens_per_expert.empty()) line += "  experts";
  for (const std::vector<int64_t>& routes : progress.tokens_per_expert) {
    StrAppend(&line, " |", LoadBar(routes), "|");
  }
  return line;
}

std::string FirstColumns(const std::string& text, size_t columns) {
  size_t seen = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool starts = (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80;
    if (starts && seen++ == columns) return text.substr(0, i);
  }
  return text;
}

ProgressPrinter::ProgressPrinter(std::FILE* out) : out_(out), terminal_(isatty(fileno(out)) == 1) {}

void ProgressPrinter::Update(const train::Progress& progress) {
  latest_ = ProgressLine(progress);
  const absl::Time now = absl::Now();
  if (now < next_) return;
  next_ = now + (terminal_ ? kRedraw : kLineEvery);
  Write();
}

void ProgressPrinter::Write() {
  if (terminal_) {
    absl::FPrintF(out_, "\r\x1b[K%s", FirstColumns(latest_, Columns(out_)));
  } else {
    absl::FPrintF(out_, "%s\n", latest_);
  }
  std::fflush(out_);
  latest_.clear();
}

void ProgressPrinter::Finish() {
  if (!latest_.empty()) Write();
  if (terminal_) std::fputc('\n', out_);
}

}  // namespace expertd::expertctl
