// Answers NOT_IMPLEMENTED with the reason, so that a caller is told more than the bare code.
#include "server/rpc/tensor_service.h"

#include "server/rpc/unary_call.h"
#include "server/rpc/unsupported.h"

namespace expertd::rpc {

grpc::ServerReadReactor<v1::PutTensorRequest>* TensorService::PutTensor(
    grpc::CallbackServerContext*, v1::PutTensorResponse*) {
  return new UnsupportedStream<grpc::ServerReadReactor<v1::PutTensorRequest>>(
      "TensorService.PutTensor");
}

grpc::ServerWriteReactor<v1::GetTensorResponse>* TensorService::GetTensor(
    grpc::CallbackServerContext*, const v1::GetTensorRequest*) {
  return new UnsupportedStream<grpc::ServerWriteReactor<v1::GetTensorResponse>>(
      "TensorService.GetTensor");
}

grpc::ServerUnaryReactor* TensorService::DeleteTensor(grpc::CallbackServerContext* context,
                                                      const v1::DeleteTensorRequest*,
                                                      v1::DeleteTensorResponse*) {
  return AnswerNow(context, Unsupported("TensorService.DeleteTensor"));
}

grpc::ServerUnaryReactor* TensorService::ListTensors(grpc::CallbackServerContext* context,
                                                     const v1::ListTensorsRequest*,
                                                     v1::ListTensorsResponse*) {
  return AnswerNow(context, Unsupported("TensorService.ListTensors"));
}

grpc::ServerUnaryReactor* TensorService::RegisterSharedMemory(
    grpc::CallbackServerContext* context, const v1::RegisterSharedMemoryRequest*,
    v1::RegisterSharedMemoryResponse*) {
  return AnswerNow(context, Unsupported("TensorService.RegisterSharedMemory"));
}

grpc::ServerUnaryReactor* TensorService::RegisterCudaMemory(grpc::CallbackServerContext* context,
                                                            const v1::RegisterCudaMemoryRequest*,
                                                            v1::RegisterCudaMemoryResponse*) {
  return AnswerNow(context, Unsupported("TensorService.RegisterCudaMemory"));
}

grpc::ServerUnaryReactor* TensorService::UnregisterMemory(grpc::CallbackServerContext* context,
                                                          const v1::UnregisterMemoryRequest*,
                                                          v1::UnregisterMemoryResponse*) {
  return AnswerNow(context, Unsupported("TensorService.UnregisterMemory"));
}

}  // namespace expertd::rpc
