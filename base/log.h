// One log line per event, key=value, on stderr.
//
// Usage: Log(LogLevel::kInfo, "group_ready").Field("epoch", epoch).Field("rank", rank);
// The line is written when the temporary ends. Never log payloads, bootstrap bytes or credentials.
#ifndef BASE_LOG_H_
#define BASE_LOG_H_

#include <string>
#include <string_view>

#include "base/strings.h"

namespace expertd {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

// Lines below this level are dropped. Thread-safe; default kInfo.
void SetLogLevel(LogLevel level);
LogLevel GetLogLevel();

class Log {
 public:
  Log(LogLevel level, std::string_view event);
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  template <typename Value>
  Log& Field(std::string_view key, const Value& value) {
    if (enabled_) Append(key, StrCat(value));
    return *this;
  }

 private:
  // Quotes the value when it holds a space, a quote or an equals sign.
  void Append(std::string_view key, std::string_view value);

  const bool enabled_;
  std::string line_;
};

}  // namespace expertd

#endif  // BASE_LOG_H_
