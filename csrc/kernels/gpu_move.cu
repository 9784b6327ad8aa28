// SPDX-License-Identifier: Apache-2.0
// The GPU kernel that copies, scales, converts and fills many segments in one launch. Each thread block processes one
// MoveChunk. NVRTC compiles gpu_chunk.h and this file at run time.

namespace farandole::gpu {

template <unsigned kBytes>
struct Word;
template <>
struct Word<1> {
  using type = unsigned char;
};
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

// ---- Elements: load() converts an element to the type in which it is computed, and store() rounds it back

template <class Integer>
struct IntegerElement {
  using Raw = Integer;
  using Number = Integer;
  static constexpr bool kInteger = true;
  static __device__ Number load(Raw raw) { return raw; }
};

template <class Float>
struct FloatElement {
  using Raw = Float;
  using Number = Float;
  static constexpr bool kInteger = false;
  static __device__ Number load(Raw raw) { return raw; }
  static __device__ Raw store(double number) { return static_cast<Raw>(number); }
};

struct HalfElement {
  using Raw = unsigned short;
  using Number = float;
  static constexpr bool kInteger = false;
  static __device__ Number load(Raw raw) {
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(raw));
    return number;
  }
  static __device__ Raw store(float number) {
    unsigned short raw;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(raw) : "f"(number));
    return raw;
  }
};

struct BrainElement {
  using Raw = unsigned short;
  using Number = float;
  static constexpr bool kInteger = false;
  static __device__ Number load(Raw raw) { return __uint_as_float(unsigned(raw) << 16); }
  static __device__ Raw store(float number) {
    unsigned short raw;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(raw) : "f"(number));
    return raw;
  }
};

template <unsigned char kType>
struct ElementOf;  // specialised by value of DType
template <>
struct ElementOf<0> {
  using type = IntegerElement<unsigned char>;
};
template <>
struct ElementOf<1> {
  using type = IntegerElement<signed char>;
};
template <>
struct ElementOf<2> {
  using type = IntegerElement<unsigned short>;
};
template <>
struct ElementOf<3> {
  using type = IntegerElement<short>;
};
template <>
struct ElementOf<4> {
  using type = IntegerElement<unsigned>;
};
template <>
struct ElementOf<5> {
  using type = IntegerElement<int>;
};
template <>
struct ElementOf<6> {
  using type = IntegerElement<unsigned long long>;
};
template <>
struct ElementOf<7> {
  using type = IntegerElement<long long>;
};
template <>
struct ElementOf<8> {
  using type = HalfElement;
};
template <>
struct ElementOf<9> {
  using type = BrainElement;
};
template <>
struct ElementOf<10> {
  using type = FloatElement<float>;
};
template <>
struct ElementOf<11> {
  using type = FloatElement<double>;
};

// Truncates towards zero. Numbers outside the type's range become its limits.
template <class Integer>
__device__ Integer saturate(double number) {
  constexpr bool kSigned = Integer(-1) < Integer(0);
  constexpr int kBits = 8 * sizeof(Integer) - (kSigned ? 1 : 0);
  constexpr double kEnd = kBits == 64 ? 0x1p64 : double(1ull << (kBits % 64));
  constexpr Integer kHighest = Integer(~0ull >> (64 - kBits));
  constexpr Integer kLowest = kSigned ? Integer(-kHighest - 1) : Integer(0);
  if (number >= kEnd) return kHighest;
  if (kSigned ? number <= -kEnd : number <= 0.0) return kLowest;
  return static_cast<Integer>(number);
}

template <class From, class To>
__device__ typename To::Raw convert(typename From::Raw raw, const MoveChunk& chunk) {
  const typename From::Number number = From::load(raw);
  if constexpr (To::kInteger) {
    using Integer = typename To::Raw;
    if (chunk.factor == 1.0) {  // a sum wraps when it is converted; a quotient always fits
      return static_cast<Integer>(chunk.divisor == 1 ? number
                                                     : number / (long long)(chunk.divisor));
    }
    return saturate<Integer>(double(number) * chunk.factor / double(chunk.divisor));
  } else if constexpr (sizeof(typename From::Number) == 8) {
    return To::store(double(number) * chunk.factor / double(chunk.divisor));
  } else {
    return To::store(float(number) * float(chunk.factor) / float(chunk.divisor));
  }
}

template <class From, class To, class FromWord, class ToWord>
__device__ void convert_words(const MoveChunk& chunk, unsigned begin, unsigned end) {
  constexpr unsigned kLanes = sizeof(FromWord) / sizeof(typename From::Raw);
  const FromWord* const from_words = (const FromWord*)chunk.source;
  ToWord* const to_words = (ToWord*)chunk.target;
#pragma unroll(kLanes > 1 ? 4 : 1)
  for (unsigned i = begin + threadIdx.x; i < end; i += blockDim.x) {
    union {
      FromWord word;
      typename From::Raw raw[kLanes];
    } in;
    union {
      ToWord word;
      typename To::Raw raw[kLanes];
    } out;
    in.word = from_words[i];
#pragma unroll
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      out.raw[lane] = convert<From, To>(in.raw[lane], chunk);
    }
    to_words[i] = out.word;
  }
}

template <class From, class To>
__device__ void convert_all(const MoveChunk& chunk) {
  using FromRaw = typename From::Raw;
  using ToRaw = typename To::Raw;
  constexpr unsigned kLarger = sizeof(FromRaw) > sizeof(ToRaw) ? sizeof(FromRaw) : sizeof(ToRaw);
  constexpr unsigned kLanes = 16 / kLarger;
  using FromWord = typename Word<kLanes * sizeof(FromRaw)>::type;
  using ToWord = typename Word<kLanes * sizeof(ToRaw)>::type;
  // Converts integers one at a time: they are seldom scaled, and this halves the time to compile the kernel.
  const bool aligned =
      !To::kInteger && chunk.source % sizeof(FromWord) == 0 && chunk.target % sizeof(ToWord) == 0;
  const unsigned words = aligned ? chunk.elements / kLanes : 0;
  if constexpr (!To::kInteger) convert_words<From, To, FromWord, ToWord>(chunk, 0, words);
  convert_words<From, To, FromRaw, ToRaw>(chunk, words * kLanes, chunk.elements);
}

template <unsigned char kFrom, unsigned char kTo>
__device__ void convert_types(const MoveChunk& chunk) {
  convert_all<typename ElementOf<kFrom>::type, typename ElementOf<kTo>::type>(chunk);
}

// ---- Copies

template <class T>
__device__ void copy_words(const MoveChunk& chunk, unsigned begin, unsigned bytes) {
  constexpr unsigned kUnrolled = 4;
  const T* const from = (const T*)(chunk.source + begin);
  T* const to = (T*)(chunk.target + begin);
  const unsigned count = bytes / sizeof(T);
  unsigned i = threadIdx.x;
  for (; i + (kUnrolled - 1) * blockDim.x < count; i += kUnrolled * blockDim.x) {
    T words[kUnrolled];  // loads all words before storing any, so that more loads are in flight
#pragma unroll
    for (unsigned k = 0; k < kUnrolled; ++k) words[k] = from[i + k * blockDim.x];
#pragma unroll
    for (unsigned k = 0; k < kUnrolled; ++k) to[i + k * blockDim.x] = words[k];
  }
  for (; i < count; i += blockDim.x) to[i] = from[i];
}

// The source and the target must have the same remainder modulo sizeof(T).
template <class T>
__device__ void copy_as(const MoveChunk& chunk) {
  unsigned head = unsigned(-chunk.source) % sizeof(T);
  head = head < chunk.elements ? head : chunk.elements;
  const unsigned body = (chunk.elements - head) / sizeof(T) * sizeof(T);
  copy_words<unsigned char>(chunk, 0, head);
  copy_words<T>(chunk, head, body);
  copy_words<unsigned char>(chunk, head + body, chunk.elements - head - body);
}

__device__ void copy_bytes(const MoveChunk& chunk) {
  const unsigned long long difference = chunk.source ^ chunk.target;
  if (difference % 16 == 0) return copy_as<uint4>(chunk);
  if (difference % 4 == 0) return copy_as<unsigned>(chunk);
  if (difference % 2 == 0) return copy_as<unsigned short>(chunk);
  copy_words<unsigned char>(chunk, 0, chunk.elements);
}

template <class T>
__device__ void fill(const MoveChunk& chunk) {
  T* const to = (T*)chunk.target;
  for (unsigned i = threadIdx.x; i < chunk.elements; i += blockDim.x) to[i] = T(chunk.pattern);
}

// ---- Choice of the type

__device__ void fill_any(const MoveChunk& chunk) {
  switch (chunk.to) {
    case 0:
    case 1: return fill<unsigned char>(chunk);
    case 2:
    case 3:
    case 8:
    case 9: return fill<unsigned short>(chunk);
    case 6:
    case 7:
    case 11: return fill<unsigned long long>(chunk);
    default: return fill<unsigned>(chunk);
  }
}

// Converts from the type kNarrow to its accumulator type kWide, or back. Returns false if the chunk has other types.
template <unsigned char kNarrow, unsigned char kWide>
__device__ bool convert_between(const MoveChunk& chunk) {
  const bool packs = chunk.from == kNarrow && chunk.to == kWide;
  const bool unpacks = chunk.from == kWide && chunk.to == kNarrow;
  if (packs) convert_types<kNarrow, kWide>(chunk);
  if (unpacks) convert_types<kWide, kNarrow>(chunk);
  return packs || unpacks;
}

__device__ void scale_any(const MoveChunk& chunk) {
  switch (chunk.from) {
    case 0: return convert_types<0, 0>(chunk);
    case 1: return convert_types<1, 1>(chunk);
    case 2: return convert_types<2, 2>(chunk);
    case 3: return convert_types<3, 3>(chunk);
    case 4: return convert_types<4, 4>(chunk);
    case 5: return convert_types<5, 5>(chunk);
    case 6: return convert_types<6, 6>(chunk);
    case 7: return convert_types<7, 7>(chunk);
    case 8: return convert_types<8, 8>(chunk);
    case 9: return convert_types<9, 9>(chunk);
    case 10: return convert_types<10, 10>(chunk);
    case 11: return convert_types<11, 11>(chunk);
    default: __trap();
  }
}

__device__ void convert_any(const MoveChunk& chunk) {
  if (chunk.from == chunk.to) return scale_any(chunk);
  const bool known = convert_between<0, 5>(chunk) || convert_between<1, 5>(chunk) ||
                     convert_between<2, 5>(chunk) || convert_between<3, 5>(chunk) ||
                     convert_between<4, 6>(chunk) || convert_between<5, 7>(chunk) ||
                     convert_between<8, 10>(chunk) || convert_between<9, 10>(chunk);
  if (!known) __trap();
}

}  // namespace farandole::gpu

extern "C" __global__ void __launch_bounds__(512)
    farandole_move(const farandole::gpu::MoveChunk* chunks) {
  using namespace farandole::gpu;
  const MoveChunk chunk = chunks[blockIdx.x];
  switch (chunk.kind) {
    case kCopyBytes: return copy_bytes(chunk);
    case kFill: return fill_any(chunk);
    case kConvert: return convert_any(chunk);
    default: __trap();
  }
}
