import type { Check } from "../../reports.js";

export const finding =
  (area: Check["area"], id: string, title: string) =>
  (status: Check["status"], found: string, more: Pick<Check, "fix" | "details"> = {}): Check => ({
    id: `${area}.${id}`,
    area,
    title,
    status,
    found,
    ...more,
  });
