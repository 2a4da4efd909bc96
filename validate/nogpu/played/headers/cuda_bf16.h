// What NCCL's header asks for by this name: of its types only the name is needed.
#pragma once
struct __nv_bfloat16;
