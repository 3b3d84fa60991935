// Zig's C++ compiler, which compiles for any glibc version and processor. It comes from PyPI, by
// hash.
import { existsSync, mkdirSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { nativeRoot, run } from "./compile.mjs";

const VERSION = "0.17.0";
/** The wheels for Linux on x86_64 and aarch64. */
const SHA256 = [
  "97079827064a7492cce5541ceb438ae8003ce1e54e399676da2d62fb7a5dc08b",
  "d2804f94f54f7fcf8169f4b212a619ad688a4e2e6592e976f0cf2e58e2cd8af3",
];

/** The compiler's command and environment. The first use installs Zig with pip (101 MB). */
export async function zig() {
  const build = join(nativeRoot, "build");
  const folder = join(build, `ziglang-${VERSION}`);
  const program = join(folder, "ziglang", "zig");
  if (!existsSync(program)) {
    const work = `${folder}.${process.pid}`;
    const pins = `${work}.txt`;
    mkdirSync(build, { recursive: true });
    writeFileSync(
      pins,
      `ziglang==${VERSION} ${SHA256.map((hash) => `--hash=sha256:${hash}`).join(" ")}\n`,
    );
    try {
      const options =
        "--no-deps --only-binary=:all: --require-hashes --disable-pip-version-check".split(" ");
      await run(["python3", "-m", "pip", "install", ...options, "--target", work, "-r", pins]);
      rmSync(folder, { recursive: true, force: true });
      renameSync(work, folder);
    } finally {
      rmSync(pins, { force: true });
      rmSync(work, { recursive: true, force: true });
    }
  }
  const cache = join(build, "zig-cache");
  const env = { ...process.env, ZIG_GLOBAL_CACHE_DIR: cache, ZIG_LOCAL_CACHE_DIR: cache };
  return { compiler: [program, "c++"], env };
}
