// The expert MLP's tests, the CPU's own, on the GPU implementation.
#include "tests/kernels/expert_mlp_test.cc"  // NOLINT: the suite is the same, only who runs differs

namespace expertd {
namespace {

INSTANTIATE_TEST_SUITE_P(Gpu, ExpertMlpTest, testing::Values("cublaslt"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace expertd
