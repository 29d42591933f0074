// Resident tensors between GPUs.
#include "tests/server/engine/resident_steps.h"

namespace expertd::engine {
namespace {

INSTANTIATE_TEST_SUITE_P(MultiGpu, ResidentStepsTest, testing::Values(ResidentShape{"nccl", 2}),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace expertd::engine
