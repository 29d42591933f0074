// Escaping and number formats of the Prometheus text format.
#include "server/observe/metrics.h"

#include <cmath>

#include "absl/strings/str_format.h"
#include "base/strings.h"

namespace expertd::observe {
namespace {

// Backslash and line feed, and in label values the quote.
std::string Escape(std::string_view text, bool quotes) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && quotes) {
      out += "\\\"";
    } else {
      out.push_back(c);
    }
  }
  return out;
}

}  // namespace

void MetricsText::Family(std::string_view name, MetricType type, std::string_view help) {
  name_ = std::string(name);
  StrAppend(&text_, "# HELP ", name, " ", Escape(help, false), "\n", "# TYPE ", name,
            type == MetricType::kCounter ? " counter\n" : " gauge\n");
}

void MetricsText::Begin(const Labels& labels) {
  text_ += name_;
  char separator = '{';
  for (const auto& [key, value] : labels) {
    text_.push_back(separator);
    StrAppend(&text_, key, "=\"", Escape(value, true), "\"");
    separator = ',';
  }
  text_ += labels.empty() ? " " : "} ";
}

void MetricsText::Sample(const Labels& labels, int64_t value) {
  Begin(labels);
  StrAppend(&text_, value, "\n");
}

void MetricsText::Sample(const Labels& labels, uint64_t value) {
  Begin(labels);
  StrAppend(&text_, value, "\n");
}

void MetricsText::Sample(const Labels& labels, double value) {
  Begin(labels);
  if (std::isnan(value)) {
    text_ += "NaN\n";
  } else if (std::isinf(value)) {
    text_ += value > 0 ? "+Inf\n" : "-Inf\n";
  } else {
    absl::StrAppendFormat(&text_, "%.17g\n", value);
  }
}

}  // namespace expertd::observe
