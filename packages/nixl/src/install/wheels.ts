import { KvError } from "@kv/interface";

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
const PINNED: Readonly<Record<string, string>> = {
  "0.10.1 cu12 x86_64": "26e59f9841985cf5b547202865036f84ae6dc23184789446fe5833e7499e21a9",
  "1.0.1 cu12 x86_64": "0143bc14d7b969c7519639821c126d3ba47cbaf38281c5d85656a348f65e06a4",
  "1.4.1 cu12 x86_64": "bc3d4f99c85375c7836beef3736f038473c183aca16cb115131c61eb7240ba33",
  "1.5.0 cu12 x86_64": "91fe990d3d6b74f3d08ed5275c70251e40a5651e3a6435c0f048a8663e7e0832",
  "1.5.0 cu13 x86_64": "5d8d2d56439bdc91ed415098c05a74e4f577621104f940269bdcbf5411690d2b",
  "1.5.1 cu12 x86_64": "a02005f84e498641b8fe02d058fdc6762c99edf7ae6430176d2d16fa57f4fb93",
  "1.5.0 cu12 aarch64": "576c94ae74aa76f8d38b9050a431100f4c3a725ffebee5f8502dd5fdd35cddb3",
  "1.5.0 cu13 aarch64": "0a3f11e247122c6a3425d1b0f9da282bc1306329535a1d665a0f820b67dbc962",
};

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
