import { readFileSync } from "node:fs";
import { createServer } from "node:net";
import { freePorts } from "@kv/testing/free-ports";
import { listening } from "@kv/testing/http/listening";
import { expect, test } from "vitest";

test("the ports are free, different, and none that the kernel gives to an outgoing connection", async () => {
  const [lowest] = readFileSync("/proc/sys/net/ipv4/ip_local_port_range", "utf8")
    .trim()
    .split(/\s+/)
    .map(Number);
  const ports = await freePorts(50);
  expect(new Set(ports).size).toBe(50);
  expect(Math.max(...ports)).toBeLessThan(lowest ?? 0);
  const servers = ports.map(() => createServer());
  await Promise.all(servers.map((server, at) => listening(server, ports[at])));
  for (const server of servers) server.close();
});
