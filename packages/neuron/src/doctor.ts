import { existsSync, readdirSync } from "node:fs";
import { KvError } from "@kv/interface";
import { loadNrtAddon } from "./nrt-addon.js";
import { nrtLibraryPath } from "./nrt-device.js";

export interface Finding {
  readonly what: string;
  readonly state: "there" | "not there" | "cannot be said";
  readonly detail: string;
  readonly hint?: string;
}

export interface DoctorSurroundings {
  readonly env: Readonly<Record<string, string | undefined>>;
  /** Where device files and drivers are looked for: "/" but in tests. */
  readonly root: string;
}

const NEEDED = [
  "nrt_init",
  "nrt_close",
  "nrt_tensor_allocate",
  "nrt_tensor_free",
  "nrt_tensor_read",
  "nrt_tensor_write",
];
const BATCH = ["nrt_tensor_read_batch", "nrt_tensor_write_batch"];

/** What of a Neuron instance is here. It opens the library to look for its calls, and initialises nothing. */
export function examine(around: DoctorSurroundings): Finding[] {
  const devices = namesIn(`${around.root}/dev`, /^neuron\d+$/);
  const efa = namesIn(`${around.root}/sys/class/infiniband`, /^(efa|rdmap)/);
  return [
    {
      what: "Neuron devices",
      ...(devices.length > 0
        ? { state: "there", detail: devices.map((name) => `/dev/${name}`).join(", ") }
        : {
            state: "not there",
            detail: "no /dev/neuron0",
            hint: "on a trn or inf instance: install aws-neuronx-dkms; elsewhere the simulated device works",
          }),
    },
    {
      what: "Neuron driver",
      ...(existsSync(`${around.root}/sys/module/neuron`)
        ? { state: "there", detail: "the module neuron is loaded" }
        : {
            state: "not there",
            detail: "the module neuron is not loaded",
            hint: "sudo modprobe neuron, after installing aws-neuronx-dkms",
          }),
    },
    ...library(around.env),
    {
      what: "EFA",
      ...(efa.length > 0
        ? { state: "there", detail: efa.join(", ") }
        : {
            state: "not there",
            detail: "no EFA device",
            hint: "without it use the backend UCX (TCP); with it LIBFABRIC",
          }),
    },
    {
      what: "copies to and from a device",
      state: "cannot be said",
      detail: "this maker has been tried against a stand-in for libnrt only, never on hardware",
    },
  ];
}

function library(env: DoctorSurroundings["env"]): Finding[] {
  const path = nrtLibraryPath(env);
  const what = "Neuron runtime";
  let symbols: Readonly<Record<string, boolean>>;
  try {
    symbols = loadNrtAddon().symbols(path);
  } catch (error) {
    const { message, hint } = KvError.from(error, "KV_STAGING_FAILED", "it does not load");
    return [
      {
        what,
        state: "not there",
        detail: `${path}: ${message}`,
        hint: hint ?? "install aws-neuronx-runtime-lib, or set KV_NRT_LIBRARY to the path of libnrt.so",
      },
    ];
  }
  const missing = NEEDED.filter((name) => symbols[name] !== true);
  const batch = BATCH.every((name) => symbols[name] === true);
  if (missing.length > 0) {
    return [{ what, state: "not there", detail: `${path} has no ${missing.join(", ")}` }];
  }
  return [
    { what, state: "there", detail: path },
    {
      what: "batch copies",
      state: batch ? "there" : "not there",
      detail: batch ? BATCH.join(", ") : "each run is a call of its own",
    },
  ];
}

function namesIn(folder: string, pattern: RegExp): string[] {
  try {
    return readdirSync(folder).filter((name) => pattern.test(name));
  } catch {
    return [];
  }
}
