import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { runCommand } from "@kv/program";
import { describePlugins, librariesOf, pluginFolder } from "../backends/plugins.js";
import type { Environment } from "../environment.js";
import { makeInCache } from "../library/cache-folder.js";
import { missingParts, nameOfMissing } from "../library/missing-parts.js";
import { downloadWheel } from "./download-wheel.js";
import LIBRARIES from "./libfabric-libraries.json" with { type: "json" };
import { extractFiles } from "./unpack-wheel.js";
import type { PinnedWheel } from "./wheels.js";

interface Source {
  readonly requirement: string;
  /** By `process.arch`. */
  readonly wheels: Readonly<Record<string, Omit<PinnedWheel, "requirement">>>;
  readonly megabytes: number;
  /** Paths in the wheel. */
  readonly library: string;
  readonly licence: string;
}

/**
 * By the library that the wheel contains. Open MPI's wheel brings hwloc, and libfabric with its tcp
 * provider built in.
 */
const SOURCES: Readonly<Record<string, Source>> = LIBRARIES;
const DRIVER = "libcuda.so.1";
const FOLDER = `libfabric-2.5-${process.arch === "arm64" ? "aarch64" : "x86_64"}`;

/**
 * Installs only what NIXL's LIBFABRIC plugin lacks: libfabric with its tcp provider, hwloc, the
 * CUDA runtime, and a stub of libcuda.so.1 where there is no NVIDIA driver. Does nothing when the
 * plugin loads with the system's libraries (as on EC2 with EFA). Rejects with `KV_INSTALL_FAILED`.
 */
export async function installLibfabric({
  libraryPath,
  environment,
  onProgress,
}: {
  libraryPath: string;
  environment: Environment;
  onProgress: (line: string) => void;
}): Promise<void> {
  const [plugin] = await describePlugins({ libraryPath, environment, names: ["LIBFABRIC"] });
  if (plugin === undefined) {
    throw new KvError(
      "KV_INSTALL_FAILED",
      `there is no LIBFABRIC plugin in ${pluginFolder(libraryPath, environment)}`,
      { hint: "NIXL 1.5.0 has one: npx --no-install kv-nixl install" },
    );
  }
  if (plugin.loads) {
    onProgress(
      `LIBFABRIC loads: nothing to do (${plugin.supplied.join(", ") || "with the system's libraries"})`,
    );
    return;
  }
  // Without the libraries of an earlier installation: the system may have changed since.
  const wanted = librariesOf(await missingParts(plugin.file, { environment }));
  const make = async (unpacked: string, work: string) => {
    for (const name of wanted) {
      const source = Object.hasOwn(SOURCES, name) ? SOURCES[name] : undefined;
      const wheel = source?.wheels[process.arch];
      if (source === undefined || wheel === undefined) continue;
      const { requirement, megabytes, library, licence } = source;
      onProgress(`downloading ${requirement} for ${name} with pip (${megabytes} MB)`);
      const verified = await downloadWheel(
        { requirement, ...wheel },
        join(work, name),
        environment,
        onProgress,
      );
      await extractFiles({
        wheel: verified,
        members: [
          [library, join(unpacked, name)],
          [licence, join(unpacked, `LICENSE.${name}.txt`)],
        ],
      });
    }
    if (wanted.includes(DRIVER)) {
      onProgress(`no ${DRIVER}, so no NVIDIA driver: compiling a stub that reports no device`);
      await compileLibcudaStub(unpacked, work, environment);
    }
    const left = await missingParts(plugin.file, { environment, folders: [unpacked] });
    if (left.length === 0) return;
    throw new KvError(
      "KV_INSTALL_FAILED",
      `LIBFABRIC still lacks ${left.map(nameOfMissing).join(", ")}`,
      {
        hint: "NIXL 1.5.0 is the newest version that works with the libfabric that is installed",
      },
    );
  };
  await makeInCache(FOLDER, environment, make, { replace: true });
  onProgress("LIBFABRIC loads");
}

/** `CUDA_ERROR_NO_DEVICE`, which the real driver returns without a GPU. */
const NO_DEVICE = 100;
/** The driver functions that NIXL's LIBFABRIC plugin calls. */
const SOURCE = `
int cuInit(unsigned flags) { (void)flags; return ${NO_DEVICE}; }
int cuCtxSetCurrent(void *context) { (void)context; return ${NO_DEVICE}; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { (void)id; (void)length; (void)device; return ${NO_DEVICE}; }
int cuPointerGetAttributes(unsigned count, void *attributes, void **data, unsigned long long pointer) {
  (void)count; (void)attributes; (void)data; (void)pointer; return ${NO_DEVICE};
}
`;

/**
 * The stub reports no device; NIXL's LIBFABRIC plugin is linked against libcuda.so.1. `folder` gets
 * the library, `work` the source. Rejects with `KV_INSTALL_FAILED`, such as without a C compiler.
 */
export async function compileLibcudaStub(
  folder: string,
  work: string,
  environment: Environment,
): Promise<void> {
  const source = join(work, "cuda.c");
  await writeFile(source, SOURCE);
  const args = [
    "-shared",
    "-fPIC",
    "-O1",
    "-Wl,-soname,libcuda.so.1",
    "-o",
    join(folder, "libcuda.so.1"),
    source,
  ];
  const compilers = environment.CC ? [environment.CC] : ["cc", "gcc", "clang"];
  for (const compiler of compilers) {
    const { exitCode, how, isFound, stderr } = await runCommand(compiler, args, {
      env: environment,
    });
    if (!isFound) continue;
    if (exitCode === 0) return;
    const why = stderr.trim().split("\n").at(-1) || how;
    throw new KvError(
      "KV_INSTALL_FAILED",
      `${compiler} could not compile a stub of libcuda.so.1: ${why}`,
    );
  }
  throw new KvError(
    "KV_INSTALL_FAILED",
    `this machine has no libcuda.so.1, and no C compiler to build a stub (tried ${compilers.join(", ")})`,
    {
      hint: "install NVIDIA's driver if there is a GPU, otherwise a compiler, such as: apt-get install gcc",
    },
  );
}
