import { readdirSync, readFileSync } from "node:fs";
import type { Check } from "./report.js";

export interface DoctorSurroundings {
  readonly env: Readonly<Record<string, string | undefined>>;
  /** Prefix of `/dev`, `/sys`, `/proc` and `/opt`, for tests. Default: empty. */
  readonly root: string;
}

const DKMS = "install aws-neuronx-dkms (AWS's Neuron repository), then: sudo modprobe neuron";

export function machineChecks(around: DoctorSurroundings): Check[] {
  const devices = namesIn(around, "/dev", /^neuron\d+$/);
  const driver = namesIn(around, "/sys/module", /^neuron$/).length > 0;
  const version = textOf(around, "/sys/module/neuron/version");
  return [
    {
      id: "machine.devices",
      area: "machine",
      title: "Neuron devices",
      ...(devices.length > 0
        ? {
            status: "ok",
            found: devices.map((name) => `/dev/${name}`).join(", "),
            details: { devices },
          }
        : {
            status: "fail",
            found: "no /dev/neuron0",
            fix: driver
              ? "reboot, or see: dmesg | grep -i neuron"
              : `on a trn or inf instance: ${DKMS}`,
          }),
    },
    {
      id: "machine.driver",
      area: "machine",
      title: "Neuron driver",
      ...(driver
        ? { status: "ok", found: `the module neuron is loaded, version ${version ?? "unknown"}` }
        : { status: "fail", found: "the module neuron is not loaded", fix: DKMS }),
    },
    coresCheck(around),
  ];
}

/** All cores, unless an environment variable limits them. */
function coresCheck({ env }: DoctorSurroundings): Check {
  const set = ["NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"].filter(
    (name) => env[name] !== undefined,
  );
  return {
    id: "machine.cores",
    area: "machine",
    title: "cores for this process",
    status: "note",
    found:
      set.length === 0
        ? "all (neither NEURON_RT_VISIBLE_CORES nor NEURON_RT_NUM_CORES is set)"
        : set.map((name) => `${name}=${env[name]}`).join(" "),
  };
}

/** What LIBFABRIC needs for EFA. `kv-nixl doctor` checks NIXL itself. */
export function networkChecks(around: DoctorSurroundings): Check[] {
  const efa = namesIn(around, "/sys/class/infiniband", /^(efa|rdmap)/);
  const title = { id: "network.efa", area: "network", title: "EFA" } as const;
  if (efa.length === 0) {
    return [
      {
        ...title,
        status: "warn",
        found: "no EFA device: KV transfers use TCP",
        fix: 'start the instance with an EFA interface and run AWS\'s EFA installer; without one, "backends": ["UCX"]',
      },
    ];
  }
  const version = textOf(around, "/sys/module/efa/version");
  const libfabric = namesIn(around, "/opt/amazon/efa/lib64", /^libfabric\.so/)[0];
  return [
    {
      ...title,
      status: "ok",
      found: `${efa.join(", ")}, driver ${version ?? "of unknown version"}`,
      details: { devices: efa },
    },
    {
      id: "network.libfabric",
      area: "network",
      title: "libfabric",
      ...(libfabric === undefined
        ? {
            status: "warn",
            found: "not in /opt/amazon/efa/lib64",
            fix: "run AWS's EFA installer, then: npx --no-install kv-nixl doctor --backend LIBFABRIC",
          }
        : { status: "ok", found: `/opt/amazon/efa/lib64/${libfabric}` }),
    },
    memlockCheck(around),
  ];
}

function memlockCheck(around: DoctorSurroundings): Check {
  const limit = /^Max locked memory\s+(\S+)/m.exec(textOf(around, "/proc/self/limits") ?? "")?.[1];
  const check = { id: "network.memlock", area: "network", title: "locked memory" } as const;
  if (limit === undefined) return { ...check, status: "note", found: "the limit cannot be read" };
  if (limit === "unlimited") return { ...check, status: "ok", found: limit };
  return {
    ...check,
    status: "warn",
    found: `${limit} bytes: EFA locks the staging pool and fails beyond the limit`,
    fix: "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd; docker run --ulimit memlock=-1)",
  };
}

function namesIn({ root }: DoctorSurroundings, folder: string, pattern: RegExp): string[] {
  try {
    return readdirSync(root + folder)
      .filter((name) => pattern.test(name))
      .sort();
  } catch {
    return [];
  }
}

function textOf({ root }: DoctorSurroundings, path: string): string | undefined {
  try {
    return readFileSync(root + path, "utf8").trim();
  } catch {
    return undefined;
  }
}
