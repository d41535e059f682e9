"""What `specdec tune` starts, and how it shows what it found."""
