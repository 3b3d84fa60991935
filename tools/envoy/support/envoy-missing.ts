import { execFile } from "node:child_process";
import { promisify } from "node:util";
import { installEnvoy } from "../install-envoy.js";

/**
 * Why tests with Envoy cannot run on this machine; undefined when they can. With CI=true the reason
 * is an error instead of a skipped suite.
 */
export const envoyMissing: string | undefined = await reason();

async function reason(): Promise<string | undefined> {
  try {
    await promisify(execFile)(await installEnvoy(), ["--version"]);
    return undefined;
  } catch (error) {
    if (process.env["CI"] === "true") throw error;
    return `no Envoy: ${(error as Error).message.trim().split("\n").at(-1)}`;
  }
}
