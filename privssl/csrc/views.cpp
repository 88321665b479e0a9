// Views of images, one after the other, so that an image stays in the processor's caches from the
// first of its changes to the last.
//
// Each change is that of privssl/data/image_operations.py, or of data/affine_augment.py, with the same roundings
// in the same order: whichever of the two does the work, views have the same bits. So setup.py lets
// no compiler fuse products with sums here. What is drawn is drawn there. It is compiled for several
// generations of processors, of which privssl/ops/dispatch.py takes the one that fits.

#include <cmath>
#include <numbers>
#include <utility>

#include "vectors.hpp"

extern "C" {

// As privssl/ops/image_transforms.py has it.
struct Images {
  int64_t rows, channels, height, width;
  int64_t last;  // 1: channels are last in memory, 0: first
};
struct Kind {
  int64_t change;   // which of ``changes``
  int64_t down;     // 1: along columns, 0: along rows
  int64_t used;     // pixels that a pixel is made from: 1, 2 or 4
  int64_t of_side;  // 1: amounts are fractions of the side, 0: pixels
  float outside;    // level of what comes in
};
}

namespace {

constexpr float BLACK = 0, MIDDLE = 127, TOP = 255;

float level(float v) { return std::rint(std::min(std::max(BLACK, v), TOP)); }  // not a number: 0
float clamped(float v, float last) { return std::min(std::max(0.f, v), last); }

// An image that is changed: levels 0..255, channels first.
class Image {
 public:
  explicit Image(const Images& of)
      : channels_(of.channels), height_(of.height), width_(of.width), pixels_(height_ * width_),
        last_(of.last), at_(channels_ * pixels_), spare_(channels_ * pixels_), grey_(pixels_),
        line_(std::max(height_, width_) + 8), number_(std::max(height_, width_)) {}

  void read(const float* x) {
    each(x, [](const float& from, float& own) { own = level((from + 1) * 127.5f); });
  }
  void write(float* y) {
    each(y, [](float& to, float& own) { to = own / 127.5f - 1; });
  }
  // One operation; place (2) in [0, 1).
  void change(const Kind& kind, float amount, const float* place) {
    (this->*changes[kind.change])(kind, amount, place);
  }

 private:
  using Change = void (Image::*)(const Kind&, float, const float*);
  static const Change changes[];

  // Goes through all numbers of an image in memory together with ours.
  template <class T, class Do>
  void each(T* theirs, Do act) {
    const Index step = last_ ? channels_ : 1, next = last_ ? 1 : pixels_;
    for (Index c = 0; c < channels_; c++) {
      float* own = channel(c);
      T* other = theirs + c * next;
      if (step == 1)
        for (Index p = 0; p < pixels_; p++) act(other[p], own[p]);
      else
        for (Index p = 0; p < pixels_; p++) act(other[p * step], own[p]);
    }
  }
  float* channel(Index c) { return at_ + c * pixels_; }
  template <class Do>
  void map(Do act) {
    float* own = at_;
    for (Index n = 0; n < channels_ * pixels_; n++) own[n] = level(act(own[n]));
  }
  // ``amount`` 0 is the degenerate image, 1 the image itself, and so on along the line.
  void away(const float* from, float amount, Index c) {
    float* own = channel(c);
    for (Index p = 0; p < pixels_; p++) own[p] = level(from[p] + amount * (own[p] - from[p]));
  }

  // ITU-R 601 luma of three channels, else the channels' mean.
  const float* grey() {
    float* grey = grey_;
    if (channels_ == 3) {
      const float *red = channel(0), *green = channel(1), *blue = channel(2);
      for (Index p = 0; p < pixels_; p++)
        grey[p] = std::floor(
            (19595 * red[p] + 38470 * green[p] + 7471 * blue[p] + 32768) / 65536);
      return grey;
    }
    std::copy(channel(0), channel(1), grey);
    for (Index c = 1; c < channels_; c++)
      for (Index p = 0; p < pixels_; p++) grey[p] += channel(c)[p];
    for (Index p = 0; p < pixels_; p++) grey[p] = std::rint(grey[p] / channels_);
    return grey;
  }

  // Levels

  void identity(const Kind&, float, const float*) {}

  void autocontrast(const Kind&, float, const float*) {
    for (Index c = 0; c < channels_; c++) {
      float *own = channel(c), low = own[0], high = own[0];
      for (Index p = 0; p < pixels_; p++)
        low = own[p] < low ? own[p] : low, high = own[p] > high ? own[p] : high;
      if (low == high) continue;
      const float scale = 1 / (high - low) * TOP;
      for (Index p = 0; p < pixels_; p++) own[p] = level((own[p] - low) * scale);
    }
  }

  void equalize(const Kind&, float, const float*) {
    for (Index c = 0; c < channels_; c++) {
      float* own = channel(c);
      int32_t counts[256] = {}, highest = 0;
      for (Index p = 0; p < pixels_; p++) counts[static_cast<int32_t>(own[p])]++;
      for (int32_t l = 0; l < 256; l++) highest = counts[l] ? counts[l] : highest;
      const int32_t step = static_cast<int32_t>(pixels_ - highest) / 255;
      if (step == 0) continue;
      float table[256];
      for (int32_t l = 0, below = 0; l < 256; below += counts[l++])
        table[l] = level(static_cast<float>((below + step / 2) / step));
      for (Index p = 0; p < pixels_; p++) own[p] = table[static_cast<int32_t>(own[p])];
    }
  }

  void invert(const Kind&, float, const float*) {
    map([](float v) { return TOP - v; });
  }

  void posterize(const Kind&, float amount, const float*) {
    const float step = std::exp2(8 - std::rint(amount));
    map([=](float v) { return std::floor(v / step) * step; });
  }

  void solarize(const Kind&, float amount, const float*) {
    map([=](float v) { return v < amount ? v : TOP - v; });
  }

  void brightness(const Kind&, float amount, const float*) {
    map([=](float v) { return v * amount; });
  }

  void contrast(const Kind&, float amount, const float*) {
    const float* grey = this->grey();
    int64_t sum = 0;
    for (Index p = 0; p < pixels_; p++) sum += static_cast<int32_t>(grey[p]);
    const float mean = std::floor(static_cast<float>(sum) / pixels_ + 0.5f);
    map([=](float v) { return mean + amount * (v - mean); });
  }

  void color(const Kind&, float amount, const float*) {
    if (channels_ != 3) return;
    const float* grey = this->grey();
    for (Index c = 0; c < channels_; c++) away(grey, amount, c);
  }

  void sharpness(const Kind&, float amount, const float*) {
    float* smooth = grey_;
    for (Index c = 0; c < channels_; c++) {
      const float* own = channel(c);
      std::copy(own, own + pixels_, smooth);
      for (Index i = 1; i + 1 < height_; i++) {
        const float *above = own + (i - 1) * width_, *here = above + width_, *under = here + width_;
        for (Index j = 1; j + 1 < width_; j++) {
          const float sum = above[j - 1] + above[j] + above[j + 1] + here[j - 1] + here[j] +
                            here[j + 1] + under[j - 1] + under[j] + under[j + 1];
          smooth[i * width_ + j] = std::rint((sum + 4 * here[j]) / 13);
        }
      }
      away(smooth, amount, c);
    }
  }

  // Places

  void shear(const Kind& kind, float amount, const float*) {
    slide(kind, [=](Index line) { return amount * (line + 0.5f); });
  }

  void translate(const Kind& kind, float amount, const float*) {
    const float side = static_cast<float>(kind.down ? height_ : width_);
    const float pixels = kind.of_side ? amount * side : amount;
    slide(kind, [=](Index) { return pixels; });
  }

  // Pixel j of a line is looked up at j + offset(line) of the same line; outside is black.
  template <class Offset>
  void slide(const Kind& kind, Offset offset) {
    const Index lines = kind.down ? width_ : height_, length = kind.down ? height_ : width_;
    const Index next = kind.down ? 1 : width_, step = kind.down ? width_ : 1;
    const float last = static_cast<float>(length);
    for (Index n = 0; n < lines; n++) {
      const float far = offset(n);
      // Pixels that are seen: those whose nearest one is inside.
      const float nearest = std::floor(far + 0.5f), whole = std::floor(far), t = far - whole;
      const Index begin = static_cast<Index>(clamped(-nearest, last));
      const Index end = static_cast<Index>(clamped(last - nearest, last));
      const Index first = static_cast<Index>(clamped(kind.used == 1 ? nearest : whole, last) -
                                             clamped(kind.used == 1 ? -nearest : -whole, last));
      for (Index c = 0; c < channels_; c++) {
        float *own = channel(c) + n * next, *line = line_ + 4;
        for (Index j = 0; j < length; j++) line[j] = own[j * step];
        const float left = line[0], right = line[length - 1];
        for (Index k = 1; k <= 4; k++) line[-k] = left, line[length - 1 + k] = right;
        for (Index j = 0; j < begin; j++) own[j * step] = BLACK;
        for (Index j = std::max(begin, end); j < length; j++) own[j * step] = BLACK;
        for (Index j = begin; j < end; j++) {
          const float* at = line + j + first;
          const float a = at[-1], b = at[0], c = at[1], d = at[2];
          float v = b;
          if (kind.used == 2) v = b + t * (c - b);
          if (kind.used == 4)
            v = b + t * (c - a + t * (2 * (a - b) + c - d + t * (b - a + d - c)));
          own[j * step] = level(v);
        }
      }
    }
  }

  void rotate(const Kind& kind, float amount, const float*) {
    const double turn = amount * (std::numbers::pi / 180);
    const float cos = static_cast<float>(std::cos(turn)), sin = static_cast<float>(std::sin(turn));
    const float high = static_cast<float>(height_), wide = static_cast<float>(width_);
    const int32_t width = static_cast<int32_t>(width_);
    for (Index i = 0; i < height_; i++) {
      const float down = i + 0.5f - high / 2;
      int32_t* number = number_;
      for (Index j = 0; j < width_; j++) {
        const float right = j + 0.5f - wide / 2;
        const float x = std::floor(cos * right - sin * down + wide / 2);
        const float y = std::floor(sin * right + cos * down + high / 2);
        const bool inside = x >= 0 && x < wide && y >= 0 && y < high;
        const int32_t pixel = static_cast<int32_t>(y) * width + static_cast<int32_t>(x);
        number[j] = inside ? pixel : -1;
      }
      for (Index c = 0; c < channels_; c++) {
        const float* own = channel(c);
        float* seen = spare_ + c * pixels_ + i * width_;
        for (Index j = 0; j < width_; j++) seen[j] = number[j] < 0 ? kind.outside : own[number[j]];
      }
    }
    std::swap(at_, spare_);
  }

  void cutout(const Kind&, float amount, const float* place) {
    const auto reach = [&](Index size, float where) {
      const float start = std::floor(std::max(0.f, where * size - amount / 2));
      return std::pair(static_cast<Index>(start),
                       std::min(size, static_cast<Index>(std::ceil(start + amount))));
    };
    const auto [top, bottom] = reach(height_, place[0]);
    const auto [left, right] = reach(width_, place[1]);
    for (Index c = 0; c < channels_; c++)
      for (Index i = top; i < bottom; i++)
        for (Index j = left; j < right; j++) channel(c)[i * width_ + j] = MIDDLE;
  }

  Index channels_, height_, width_, pixels_;
  bool last_;
  Room<float> at_, spare_, grey_, line_;  // spare_: as at_; line_: one that slides
  Room<int32_t> number_;                  // which pixel is seen; -1: none
};

// As privssl/ops/image_transforms.py numbers them.
const Image::Change Image::changes[] = {
    &Image::identity,   &Image::autocontrast, &Image::equalize, &Image::invert,
    &Image::posterize,  &Image::solarize,     &Image::brightness, &Image::contrast,
    &Image::color,      &Image::sharpness,    &Image::shear,    &Image::translate,
    &Image::rotate,     &Image::cutout,
};

// Which of ``side`` places is seen at each; beyond the first and the last the line is mirrored.
void mirrored(Index side, Index shift, int64_t* places) {
  const Index last = side - 1;
  for (Index n = 0; n < side; n++) places[n] = last - std::abs(last - std::abs(n - shift));
}

}  // namespace

extern "C" {

int views_version() { return 1; }

// y: images x, shifted (2) by whole pixels down and to the right, less than the side; where an image
// is flipped it is mirrored left to right before.
void views_move(const Images* images, const int64_t* shifts, const uint8_t* flipped, const float* x,
                float* y) {
  const auto [rows, channels, height, width, last] = *images;
  const Index pixels = height * width, inner = last ? channels : 1;
  Room<int64_t> lines(height), columns(width);
  for (Index row = 0; row < rows; row++, shifts += 2, flipped++) {
    mirrored(height, shifts[0], lines);
    mirrored(width, shifts[1], columns);
    for (Index j = 0; *flipped && j < width; j++) columns[j] = width - 1 - columns[j];
    for (Index plane = 0; plane < channels / inner; plane++, x += pixels * inner)
      for (Index i = 0; i < height; i++) {
        const float* line = x + lines[i] * width * inner;
        if (inner == 1)
          for (Index j = 0; j < width; j++) *y++ = line[columns[j]];
        else
          for (Index j = 0; j < width; j++)
            y = std::copy_n(line + columns[j] * inner, inner, y);
      }
  }
}

// y: images x in [-1, 1], each changed ``count`` times: by which (count) of the kinds, with amounts
// (count) and places (count, 2). A number below 0 stands for no operation.
void views_change(const Images* images, int64_t count, const Kind* kinds, const int64_t* which,
                  const float* amounts, const float* places, const float* x, float* y) {
  Image image(*images);
  const Index size = images->channels * images->height * images->width;
  for (int64_t row = 0; row < images->rows; row++, x += size, y += size) {
    image.read(x);
    for (int64_t n = 0; n < count; n++, which++, amounts++, places += 2)
      if (*which >= 0) image.change(kinds[*which], *amounts, places);
    image.write(y);
  }
}

}  // extern "C"
