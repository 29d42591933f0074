// Tests of the Prometheus text format.
#include "server/observe/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace expertd::observe {
namespace {

TEST(MetricsTest, FamilyWithSamples) {
  MetricsText text;
  text.Family("expertd_steps_total", MetricType::kCounter, "Steps, by result.");
  text.Sample({{"result", "ok"}}, uint64_t{18446744073709551615u});
  text.Sample({{"result", "error"}, {"reason", "X"}}, int64_t{-3});
  text.Family("expertd_up", MetricType::kGauge, "Up.");
  text.Sample({}, 0.5);
  EXPECT_EQ(text.text(),
            "# HELP expertd_steps_total Steps, by result.\n"
            "# TYPE expertd_steps_total counter\n"
            "expertd_steps_total{result=\"ok\"} 18446744073709551615\n"
            "expertd_steps_total{result=\"error\",reason=\"X\"} -3\n"
            "# HELP expertd_up Up.\n"
            "# TYPE expertd_up gauge\n"
            "expertd_up 0.5\n");
}

TEST(MetricsTest, EscapesLabelsAndHelp) {
  MetricsText text;
  text.Family("m", MetricType::kGauge, "a \\ \"b\"\nc");
  text.Sample({{"l", "a \\ \"b\"\nc"}}, int64_t{1});
  EXPECT_EQ(text.text(),
            "# HELP m a \\\\ \"b\"\\nc\n"
            "# TYPE m gauge\n"
            "m{l=\"a \\\\ \\\"b\\\"\\nc\"} 1\n");
}

TEST(MetricsTest, SpecialNumbers) {
  MetricsText text;
  text.Family("m", MetricType::kGauge, "h");
  text.Sample({}, std::numeric_limits<double>::infinity());
  text.Sample({}, -std::numeric_limits<double>::infinity());
  text.Sample({}, std::nan(""));
  EXPECT_NE(text.text().find("m +Inf\nm -Inf\nm NaN\n"), std::string::npos);
}

}  // namespace
}  // namespace expertd::observe
