import { nvidiaGpus } from "../../memory/memory-types.js";
import type { Host } from "../host.js";
import type { Check } from "../report.js";

const DEFAULT_DOCKER_SHM_BYTES = 64 << 20;
const CAP_SYS_PTRACE = 19n;

/** An RDMA or EFA device. */
export interface RdmaDevice {
  /** The kernel's name for it. */
  readonly name: string;
  /** Whether it is AWS's EFA. */
  readonly efa: boolean;
  /** The link layer, such as "Ethernet" or "InfiniBand". */
  readonly link: string;
  /** State of each port, such as "4: ACTIVE". */
  readonly ports: readonly string[];
  /** What the first port carries, in Gb/s; undefined where the kernel does not say. */
  readonly gigabitsPerSecond?: number | undefined;
}

/** The devices in `/sys/class/infiniband`. */
export function rdmaDevices(host: Host): RdmaDevice[] {
  const folder = "/sys/class/infiniband";
  return host.names(folder).map((name) => {
    const at = `${folder}/${name}`;
    const ports = host.names(`${at}/ports`);
    // "400 Gb/sec (4X NDR)".
    const rate = Number.parseFloat(host.text(`${at}/ports/${ports[0] ?? 1}/rate`) ?? "");
    return {
      name,
      efa: host.linkName(`${at}/device/driver`) === "efa" || /^efa/.test(name),
      link: host.text(`${at}/ports/${ports[0] ?? 1}/link_layer`) ?? "unknown link",
      ports: ports.map((port) => host.text(`${at}/ports/${port}/state`) ?? "unknown"),
      ...(rate > 0 ? { gigabitsPerSecond: rate } : {}),
    };
  });
}

/**
 * Checks the kernel and the container: locked memory, access to the memory of other processes,
 * shared memory, devices.
 */
export function machineChecks(host: Host, backends: readonly string[]): Check[] {
  if (host.platform !== "linux") return [];
  const devices = rdmaDevices(host);
  return [
    memlock(host, devices),
    descriptors(host),
    ptrace(host),
    sharedMemory(host),
    ...rdma(host, devices, backends),
    gpu(host),
  ];
}

function memlock(host: Host, devices: readonly RdmaDevice[]): Check {
  const line = /^Max locked memory\s+(\S+)/m.exec(host.text("/proc/self/limits") ?? "")?.[1];
  const check = { id: "machine.memlock", area: "machine", title: "locked memory" } as const;
  if (line === undefined) return { ...check, status: "note", found: "the limit cannot be read" };
  const details = { limitBytes: line === "unlimited" ? null : Number(line) };
  if (line === "unlimited") return { ...check, status: "ok", found: "unlimited", details };
  const found = `${Math.round(Number(line) / 1024)} KiB`;
  if (devices.length === 0) {
    return {
      ...check,
      status: "note",
      found: `${found}; without an RDMA device nothing is locked`,
      details,
    };
  }
  return {
    ...check,
    status: "warn",
    found: `${found}: RDMA locks all registered memory, and registration fails beyond the limit`,
    fix: "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd; docker run --ulimit memlock=-1)",
    details,
  };
}

/**
 * An agent needs 40 free file descriptors, and a peer one to four. Below this a few peers are too
 * many.
 */
const FEW_DESCRIPTORS = 512;

function descriptors(host: Host): Check {
  const check = { id: "machine.descriptors", area: "machine", title: "file descriptors" } as const;
  const line = /^Max open files\s+(\S+)/m.exec(host.text("/proc/self/limits") ?? "")?.[1];
  if (line === undefined) return { ...check, status: "note", found: "the limit cannot be read" };
  const limit = line === "unlimited" ? Number.POSITIVE_INFINITY : Number(line);
  const details = { limit: line === "unlimited" ? null : limit };
  if (limit >= FEW_DESCRIPTORS) return { ...check, status: "ok", found: line, details };
  return {
    ...check,
    status: "warn",
    found: `${line}: an agent needs 40, and each peer up to 4`,
    fix: "ulimit -n 4096 (LimitNOFILE=4096 in systemd; docker run --ulimit nofile=4096)",
    details,
  };
}

function ptrace(host: Host): Check {
  const check = { id: "machine.ptrace", area: "machine", title: "ptrace scope (CMA)" } as const;
  const text = host.text("/proc/sys/kernel/yama/ptrace_scope");
  if (text === undefined) {
    return {
      ...check,
      status: "ok",
      found: "no Yama: processes of one user may read each other's memory",
    };
  }
  const scope = Number(text);
  const capabilities =
    /^CapEff:\s*([0-9a-f]+)/m.exec(host.text("/proc/self/status") ?? "")?.[1] ?? "0";
  const capable = ((BigInt(`0x${capabilities}`) >> CAP_SYS_PTRACE) & 1n) === 1n;
  const details = { scope, capable };
  if (scope === 0)
    return {
      ...check,
      status: "ok",
      found: "0: processes of one user may read each other's memory",
      details,
    };
  if (capable && scope < 3) {
    return {
      ...check,
      status: "ok",
      found: `${scope}, and this process has CAP_SYS_PTRACE`,
      details,
    };
  }
  return {
    ...check,
    status: "warn",
    found: `${scope}: processes on this host cannot copy from each other (CMA); UCX uses a slower transport`,
    fix: "sysctl -w kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE (docker run --cap-add=SYS_PTRACE)",
    details,
  };
}

function sharedMemory(host: Host): Check {
  const check = { id: "machine.shm", area: "machine", title: "shared memory" } as const;
  const space = host.space("/dev/shm");
  if (space === undefined) {
    return {
      ...check,
      status: "warn",
      found: "there is no /dev/shm: UCX cannot use shared memory between processes",
      fix: "mount -t tmpfs tmpfs /dev/shm",
    };
  }
  const mib = (bytes: number) => `${Math.round(bytes / 2 ** 20)} MiB`;
  const found = `/dev/shm has ${mib(space.freeBytes)} free of ${mib(space.totalBytes)}`;
  const details = { ...space };
  if (host.writable("/dev/shm") && space.freeBytes > DEFAULT_DOCKER_SHM_BYTES)
    return { ...check, status: "ok", found, details };
  return {
    ...check,
    status: "warn",
    ...(host.writable("/dev/shm")
      ? {
          found: `${found}: too little for several agents`,
          fix: "enlarge it: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm",
        }
      : {
          found: "/dev/shm cannot be written, and UCX does not start",
          fix: "mount -o remount,rw /dev/shm, or UCX_TLS=^posix on both sides",
        }),
    details,
  };
}

function rdma(host: Host, devices: readonly RdmaDevice[], backends: readonly string[]): Check[] {
  if (devices.length === 0) {
    return [
      {
        id: "machine.rdma",
        area: "machine",
        title: "RDMA and EFA devices",
        status: "note",
        found: "none: transfers to other hosts use TCP",
        details: { devices: [] },
      },
    ];
  }
  const verbs = host.names("/dev/infiniband").filter((name) => /^uverbs/.test(name));
  const reachable = verbs.some((name) => host.writable(`/dev/infiniband/${name}`));
  const checks = devices.map((device): Check => {
    const { name, efa, link, ports } = device;
    const check = {
      id: `machine.rdma.${name}`,
      area: "machine",
      title: efa ? "EFA device" : "RDMA device",
      details: { ...device },
    } as const;
    const found = `${name}, ${link}, ports ${ports.join("; ") || "none"}`;
    if (!reachable) {
      return {
        ...check,
        status: "warn",
        found: `${found}; /dev/infiniband/uverbs* cannot be opened here`,
        fix: "give the container access to the devices: docker run --device=/dev/infiniband",
      };
    }
    if (!ports.some((state) => state.includes("ACTIVE"))) {
      return {
        ...check,
        status: "warn",
        found: `${found}: no port is active`,
        fix: `see: rdma link show ${name}`,
      };
    }
    return { ...check, status: "ok", found };
  });
  if (devices.every(({ efa }) => efa) && !backends.includes("LIBFABRIC")) {
    checks.push({
      id: "machine.efa",
      area: "machine",
      title: "EFA with UCX",
      status: "warn",
      found: `the devices are EFA, and the backend is ${backends.join(",")}: READ and WRITE would not use EFA`,
      fix: "NIXL_BACKEND=LIBFABRIC on both sides",
    });
  }
  return checks;
}

function gpu(host: Host): Check {
  const cards = nvidiaGpus(host.names);
  const neuron = host.names("/dev").filter((name) => /^neuron\d+$/.test(name));
  const found = [
    cards.length > 0 ? `${cards.length} NVIDIA` : "",
    neuron.length > 0 ? `${neuron.length} Neuron` : "",
  ].filter((text) => text !== "");
  return {
    id: "machine.accelerators",
    area: "machine",
    title: "accelerators",
    status: "note",
    found: found.length > 0 ? found.join(", ") : "none: KV caches are in DRAM",
    details: { nvidia: cards, neuron },
  };
}
