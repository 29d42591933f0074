// The suite of expert MLPs on the CPU.
#include "tests/kernels/expert_mlp_cases.h"

namespace expertd {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, ExpertMlpTest, testing::Values("plain", "onednn"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace expertd
