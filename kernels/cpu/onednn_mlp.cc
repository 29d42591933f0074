// CpuMlp over OnednnMatmul.
#include "kernels/cpu/onednn_mlp.h"

#include "kernels/cpu/cpu_mlp.h"
#include "kernels/cpu/onednn_matmul.h"

namespace expertd {

std::unique_ptr<ExpertMlp> CreateOnednnMlp(const MlpConfig& config) {
  return std::make_unique<CpuMlp>(config, std::make_unique<OnednnMatmul>(config));
}

}  // namespace expertd
