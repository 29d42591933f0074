// Formats log lines and writes each with a single call, so that lines of threads never mix.
#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace expertd {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};

constexpr std::string_view kLevelNames[] = {"DEBUG", "INFO", "WARNING", "ERROR"};

}  // namespace

void SetLogLevel(LogLevel level) { g_level = level; }
LogLevel GetLogLevel() { return g_level; }

Log::Log(LogLevel level, std::string_view event) : enabled_(level >= GetLogLevel()) {
  if (!enabled_) return;
  line_ = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  StrAppend(&line_, " ", kLevelNames[static_cast<int>(level)], " event=", event);
}

void Log::Append(std::string_view key, std::string_view value) {
  const bool plain = !value.empty() && std::none_of(value.begin(), value.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte <= ' ' || byte == 0x7f || c == '"' || c == '=';
  });
  StrAppend(&line_, " ", key, "=");
  if (plain) {
    StrAppend(&line_, value);
  } else {
    StrAppend(&line_, "\"", absl::CEscape(AbslView(value)), "\"");
  }
}

Log::~Log() {
  if (!enabled_) return;
  line_.push_back('\n');
  // A log line that cannot be written has nowhere to be reported.
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, line_.data(), line_.size());
}

}  // namespace expertd
