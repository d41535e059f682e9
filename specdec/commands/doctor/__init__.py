"""The deployment checklist of speculation: what can be measured is, and each line says what to do."""
