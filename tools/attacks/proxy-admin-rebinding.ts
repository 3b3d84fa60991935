import { request } from "node:http";
import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackProxy, observedText, untilAborted } from "./support/attacked-proxy.js";

const BODY = '{"role":"decode","instance":"127.0.0.1:1"}';

/**
 * What a page of another site can have a browser send: each header set, with the status that
 * refuses it.
 */
const TRIES: readonly (readonly [Record<string, string>, number])[] = [
  [
    {
      host: "evil.example:9090",
      origin: "http://evil.example:9090",
      "content-type": "application/json",
    },
    403,
  ],
  [{ host: "evil.example:9090", "content-type": "application/json" }, 403],
  [{ origin: "http://evil.example", "content-type": "application/json" }, 403],
  [{ origin: "null", "content-type": "application/json" }, 403],
  [{ "content-type": "text/plain" }, 415],
  [{ "content-type": "application/x-www-form-urlencoded" }, 415],
];

function ask(
  adminUrl: string,
  path: string,
  method: string,
  headers: Record<string, string>,
): Promise<number> {
  return new Promise((resolve) => {
    const asked = request(`${adminUrl}${path}`, { method, headers, agent: false }, (response) => {
      response.resume().on("end", () => resolve(response.statusCode ?? 0));
    });
    asked.on("error", () => resolve(0));
    asked.end(method === "POST" ? BODY : undefined);
  });
}

async function round(adminUrl: string): Promise<string[]> {
  const passed: string[] = [];
  for (const path of ["/instances/add", "/instances/drain", "/instances/remove"]) {
    for (const [headers, wanted] of TRIES) {
      const status = await ask(adminUrl, path, "POST", headers);
      if (status !== wanted) passed.push(`${path} ${JSON.stringify(headers)}: ${status}`);
    }
  }
  for (const path of ["/status", "/requests", "/metrics", "/events"]) {
    const status = await ask(adminUrl, path, "GET", { host: "evil.example:9090" });
    if (status !== 403) passed.push(`${path}: ${status}`);
  }
  return passed;
}

/** Sends what a page of another site could, to an admin port without a token. */
export async function run(): Promise<AttackResult> {
  const passed: string[] = [];
  return await attackProxy(
    async ({ adminUrl }) => {
      for (let at = 0; at < 20; at += 1) passed.push(...(await round(adminUrl)));
    },
    (seen) => ({
      attack: "proxy: admin port through a browser (DNS rebinding, other origins, forms)",
      tries: "20 times 22 requests",
      result: `${passed.length} passed${passed[0] === undefined ? "" : `, ${passed[0]}`}; ${observedText(seen)}`,
      ok: passed.length === 0 && seen.wrong === 0,
    }),
  );
}

export function flood({ adminUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, () => round(adminUrl));
}
