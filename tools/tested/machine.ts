import { spawnSync } from "node:child_process";
import { existsSync } from "node:fs";
import { cpus } from "node:os";

/** Processors, C library and GPU of this machine, for a record. */
export function machine(): string {
  const { header } = process.report.getReport() as { header: { glibcVersionRuntime?: string } };
  const query = ["--query-gpu=name,driver_version", "--format=csv,noheader"];
  const gpus = existsSync("/dev/nvidia0")
    ? spawnSync("nvidia-smi", query, { encoding: "utf8" }).stdout
    : "";
  return [
    `${cpus().length} × ${cpus()[0]?.model ?? process.arch}`,
    ...(header.glibcVersionRuntime === undefined ? [] : [`glibc ${header.glibcVersionRuntime}`]),
    ...(gpus ?? "")
      .split("\n")
      .filter(Boolean)
      .map((gpu) => gpu.replace(", ", ", driver ")),
  ].join(", ");
}
