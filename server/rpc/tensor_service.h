// TensorService over the engine; registered memory is not served yet.
#ifndef SERVER_RPC_TENSOR_SERVICE_H_
#define SERVER_RPC_TENSOR_SERVICE_H_

#include <cstdint>

#include "expertd/v1/tensor_service.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/rpc/gate.h"

namespace expertd::rpc {

// `engine` and `calls` must outlive the service and every call of it. Streams are inside `calls`
// until they have ended.
class TensorService final : public v1::TensorService::CallbackService {
 public:
  TensorService(engine::Engine& engine, Gate& calls, int64_t limit_bytes)
      : engine_(engine), calls_(calls), limit_bytes_(limit_bytes) {}

  grpc::ServerReadReactor<v1::PutTensorRequest>* PutTensor(
      grpc::CallbackServerContext* context, v1::PutTensorResponse* response) override;
  grpc::ServerWriteReactor<v1::GetTensorResponse>* GetTensor(
      grpc::CallbackServerContext* context, const v1::GetTensorRequest* request) override;
  grpc::ServerUnaryReactor* DeleteTensor(grpc::CallbackServerContext* context,
                                         const v1::DeleteTensorRequest* request,
                                         v1::DeleteTensorResponse*) override;
  grpc::ServerUnaryReactor* ListTensors(grpc::CallbackServerContext* context,
                                        const v1::ListTensorsRequest*,
                                        v1::ListTensorsResponse* response) override;
  grpc::ServerUnaryReactor* RegisterSharedMemory(grpc::CallbackServerContext* context,
                                                 const v1::RegisterSharedMemoryRequest*,
                                                 v1::RegisterSharedMemoryResponse*) override;
  grpc::ServerUnaryReactor* RegisterCudaMemory(grpc::CallbackServerContext* context,
                                               const v1::RegisterCudaMemoryRequest*,
                                               v1::RegisterCudaMemoryResponse*) override;
  grpc::ServerUnaryReactor* UnregisterMemory(grpc::CallbackServerContext* context,
                                             const v1::UnregisterMemoryRequest*,
                                             v1::UnregisterMemoryResponse*) override;

 private:
  engine::Engine& engine_;
  Gate& calls_;
  const int64_t limit_bytes_;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_TENSOR_SERVICE_H_
