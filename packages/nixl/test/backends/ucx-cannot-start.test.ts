// UCX in namespaces of processes that lack what it needs.
import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import { someOf } from "@kv/testing/long-run";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { bundled } from "@kv/testing/node-programs";
import { describe, expect, test } from "vitest";

const CHILD = fileURLToPath(new URL("../children/create-agent.ts", import.meta.url));

/** Runs a shell command in new namespaces of users, IPC, mounts and the network. */
const inNamespaces = (command: string, env: NodeJS.ProcessEnv = {}) =>
  spawnSync("unshare", ["-Urimn", "bash", "-c", command], {
    encoding: "utf8",
    env: { ...process.env, UCX_TLS: undefined, ...env },
  });
const unshared = inNamespaces(
  "ip link set lo up && echo 1 > /proc/sys/kernel/shmmni && mount -t tmpfs none /mnt",
);
const missing =
  nixlMissing ?? (unshared.status === 0 ? undefined : "unshare or ip is not allowed here");

describe.skipIf(missing)(
  `N10: UCX that cannot start says why, and what to set (${missing ?? "found"})`,
  () => {
    const LO = "ip link set lo up";
    const CASES: [name: string, before: string, reason: string, fix: string][] = [
      [
        "kernel.shmmni of 0",
        `${LO}; echo 0 > /proc/sys/kernel/shmmni`,
        "kernel.shmmni is 0",
        "UCX_TLS=^sysv",
      ],
      [
        "kernel.shmmax of 0",
        `${LO}; echo 0 > /proc/sys/kernel/shmmax`,
        "kernel.shmmax is 0",
        "UCX_TLS=^sysv",
      ],
      [
        "kernel.shmall of 0",
        `${LO}; echo 0 > /proc/sys/kernel/shmall`,
        "kernel.shmall is 0",
        "UCX_TLS=^sysv",
      ],
      [
        "a read-only /dev/shm",
        `${LO}; mount -t tmpfs -o ro none /dev/shm`,
        "/dev/shm cannot be written",
        "UCX_TLS=^posix",
      ],
      ["no interface that is up", "true", "no network interface is up", "ip link set lo up"],
      ["no /sys", `${LO}; mount -t tmpfs none /sys`, "/sys/class/net is not there", "mount /sys"],
    ];
    test.each(someOf(CASES, 4))("%s", async (_name, before, reason, fix) => {
      const program = `${before}; exec ${process.execPath} ${await bundled(CHILD)}`;
      const { stdout, stderr } = inNamespaces(program);
      expect(JSON.parse(stdout), stderr).toMatchObject({
        code: "KV_BACKEND_UNAVAILABLE",
        message: expect.stringContaining(reason),
        hint: expect.stringContaining(fix),
      });
      // What the error says to set helps.
      const [, variable, value] = /(UCX_TLS)=(\S+)/.exec(fix) ?? [];
      if (variable === undefined) return;
      expect(JSON.parse(inNamespaces(program, { [variable]: value }).stdout)).toMatchObject({
        code: "none",
      });
    });
  },
);
