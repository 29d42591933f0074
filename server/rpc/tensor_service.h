// TensorService: no method is served yet.
#ifndef SERVER_RPC_TENSOR_SERVICE_H_
#define SERVER_RPC_TENSOR_SERVICE_H_

#include "expertd/v1/tensor_service.grpc.pb.h"

namespace expertd::rpc {

class TensorService final : public v1::TensorService::CallbackService {
 public:
  grpc::ServerReadReactor<v1::PutTensorRequest>* PutTensor(grpc::CallbackServerContext* context,
                                                           v1::PutTensorResponse*) override;
  grpc::ServerWriteReactor<v1::GetTensorResponse>* GetTensor(grpc::CallbackServerContext* context,
                                                             const v1::GetTensorRequest*) override;
  grpc::ServerUnaryReactor* DeleteTensor(grpc::CallbackServerContext* context,
                                         const v1::DeleteTensorRequest*,
                                         v1::DeleteTensorResponse*) override;
  grpc::ServerUnaryReactor* ListTensors(grpc::CallbackServerContext* context,
                                        const v1::ListTensorsRequest*,
                                        v1::ListTensorsResponse*) override;
  grpc::ServerUnaryReactor* RegisterSharedMemory(grpc::CallbackServerContext* context,
                                                 const v1::RegisterSharedMemoryRequest*,
                                                 v1::RegisterSharedMemoryResponse*) override;
  grpc::ServerUnaryReactor* RegisterCudaMemory(grpc::CallbackServerContext* context,
                                               const v1::RegisterCudaMemoryRequest*,
                                               v1::RegisterCudaMemoryResponse*) override;
  grpc::ServerUnaryReactor* UnregisterMemory(grpc::CallbackServerContext* context,
                                             const v1::UnregisterMemoryRequest*,
                                             v1::UnregisterMemoryResponse*) override;
};

}  // namespace expertd::rpc

#endif  // SERVER_RPC_TENSOR_SERVICE_H_
