// Text of a Prometheus scrape (text format 0.0.4), built family by family.
//
// Usage:
//   MetricsText text;
//   text.Family("expertd_steps_total", MetricType::kCounter, "Steps that ended, by result.");
//   text.Sample({{"result", "ok"}}, 12);
// Label values and help may hold anything; names must be valid and are the caller's constants.
#ifndef SERVER_OBSERVE_METRICS_H_
#define SERVER_OBSERVE_METRICS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace expertd::observe {

enum class MetricType { kCounter, kGauge };

using Labels = std::vector<std::pair<std::string_view, std::string_view>>;

class MetricsText {
 public:
  // Starts a family; its samples follow.
  void Family(std::string_view name, MetricType type, std::string_view help);
  void Sample(const Labels& labels, int64_t value);
  void Sample(const Labels& labels, uint64_t value);
  void Sample(const Labels& labels, double value);

  const std::string& text() const { return text_; }

 private:
  void Begin(const Labels& labels);

  std::string name_;
  std::string text_;
};

}  // namespace expertd::observe

#endif  // SERVER_OBSERVE_METRICS_H_
