#!/usr/bin/env node
import { KvError } from "@kv/interface";
import { parseCli } from "./cli-options.js";
import { createProxy } from "./proxy.js";
import { createStderrLog } from "./stderr-log.js";

async function main(): Promise<void> {
  const { host, port, logLevel, settings } = parseCli(process.argv.slice(2));
  const log = createStderrLog(logLevel, (line) => process.stderr.write(line));
  const proxy = createProxy({ ...settings, log });
  const { url } = await proxy.listen({ host, port });
  const { prefillers, decoders } = proxy.status();
  const names = (instances: typeof prefillers) => instances.map((instance) => instance.url).join(" ");
  process.stdout.write(`kv-proxy ready ${url} prefill ${names(prefillers)} decode ${names(decoders)}\n`);

  let asked = 0;
  const stop = (signal: NodeJS.Signals) => {
    asked++;
    log.info("closing", { signal, in_flight: proxy.status().requests.in_flight });
    // The second signal is impatience: requests in flight are given up.
    proxy.close(asked > 1 ? { graceMs: 0 } : {}).catch(fail);
  };
  process.on("SIGTERM", stop);
  process.on("SIGINT", stop);
}

function fail(thrown: unknown): void {
  const error = KvError.from(thrown, "KV_INTERNAL", "kv-proxy failed");
  process.stderr.write(
    `kv-proxy: ${error.code}: ${error.message}${error.hint ? `\nhint: ${error.hint}` : ""}\n`,
  );
  process.exitCode = 1;
}

main().catch(fail);
