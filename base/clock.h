// Steady time behind an interface, so that every decision about time can be tested with a fake.
#ifndef BASE_CLOCK_H_
#define BASE_CLOCK_H_

#include <chrono>

namespace expertd {

using SteadyTime = std::chrono::steady_clock::time_point;
using Duration = std::chrono::nanoseconds;

// A source of monotonic time. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual SteadyTime Now() const = 0;

  // The process-wide real clock; never destroyed.
  static const Clock& Real();
};

class SteadyClock final : public Clock {
 public:
  SteadyTime Now() const override { return std::chrono::steady_clock::now(); }
};

inline const Clock& Clock::Real() {
  static const SteadyClock clock;
  return clock;
}

// Seconds and microseconds as a double, for reports and messages.
inline double ToSeconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}
inline double ToMicros(Duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

}  // namespace expertd

#endif  // BASE_CLOCK_H_
