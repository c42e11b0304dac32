"""Upload and download of runs, models and datasets: repositories of the Hugging Face hub."""
