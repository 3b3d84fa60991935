import { KvError } from "@kv/interface";
import WHEELS from "./wheels.json" with { type: "json" };

/** A major version of CUDA that NIXL has wheels for. */
export type Cuda = 12 | 13;

export interface PinnedWheel {
  /** pip's requirement, such as `nixl-cu12==1.5.0`. */
  readonly requirement: string;
  /** pip's platform tag, such as `manylinux_2_28_x86_64`. */
  readonly platform: string;
  /** SHA-256 of the file, in hex. */
  readonly sha256: string;
}

export interface Wheel extends PinnedWheel {
  /** Folders of libraries. Their RPATHs are relative, so they must stay side by side. */
  readonly folders: readonly string[];
  readonly folder: string;
}

/** The default version, with which everything is tested. */
export const DEFAULT_VERSION = "1.5.0";
/** Wheels differ by Python version only in the bindings, which are not unpacked. */
export const PYTHON_VERSION = "3.12";

/** SHA-256 by version, CUDA and machine. */
const PINNED: Readonly<Record<string, string>> = WHEELS;

const MACHINES: Readonly<Record<string, string>> = { x64: "x86_64", arm64: "aarch64" };

/** `arch` is a `process.arch`. Throws `KV_INSTALL_FAILED`, which lists the known wheels. */
export function wheelFor(version: string, cuda: Cuda, arch: string): Wheel {
  const machine = MACHINES[arch];
  const key = `${version} cu${cuda} ${machine}`;
  const pinned = machine === undefined || !Object.hasOwn(PINNED, key) ? undefined : PINNED[key];
  if (pinned === undefined) {
    throw new KvError(
      "KV_INSTALL_FAILED",
      `no wheel is pinned for NIXL ${version}, CUDA ${cuda}, ${machine ?? arch}`,
      {
        hint: `known: ${Object.keys(PINNED).join("; ")}; for another, install it with pip and set KV_NIXL_LIBRARY`,
      },
    );
  }
  return {
    requirement: `nixl-cu${cuda}==${version}`,
    platform: `manylinux_2_28_${machine}`,
    sha256: pinned,
    folders: [`.nixl_cu${cuda}.mesonpy.libs`, `nixl_cu${cuda}.libs`],
    folder: `nixl-cu${cuda}-${version}-${machine}`,
  };
}
