import { runKvPlan } from "../src/cli/run.js";

/** `kv-plan` in this process, with what it printed. */
export async function captured(...args: string[]): Promise<{ code: number; stdout: string; stderr: string }> {
  let [stdout, stderr] = ["", ""];
  const code = await runKvPlan(args, {
    stdout: (text) => {
      stdout += text;
    },
    stderr: (text) => {
      stderr += text;
    },
  });
  return { code, stdout, stderr };
}
