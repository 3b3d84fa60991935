import type { Check } from "../../reports.js";

export const finding =
  (area: Check["area"], id: string, title: string, details?: Check["details"]) =>
  (status: Check["status"], found: string, fix?: string): Check => ({
    id: `${area}.${id}`,
    area,
    title,
    status,
    found,
    fix,
    details,
  });
